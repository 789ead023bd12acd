"""Handlers without `shutdown`: remains of dropped ones, and their copies in forked children."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.etcd_server import EtcdServer
from tests.paths import ROOT

SECONDS = 180.0
BACKENDS = {
    "ours": ("c10d", "file", "etcd-v2", "etcd", "elasticjob"),
    "torchs": ("c10d", "file", "etcd-v2"),
}
CASES = [
    f"{who}-{backend}-{rounds}"
    for who, backends in BACKENDS.items()
    for backend in backends
    for rounds in (0, 2)
]
REFUSED = (
    "next_rendezvous", "num_nodes_waiting", "is_closed", "set_closed", "is_registered", "new",
    "directed", "new after its shutdown",
)  # fmt: skip


def reports(module: str, *arguments: str) -> dict[str, Any]:
    """Run a helper program; return its reports by the name of each case."""
    root = ROOT
    done = subprocess.run(
        (sys.executable, "-m", module, *arguments),
        cwd=root,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {found.pop("name"): found for found in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    folder = tmp_path_factory.mktemp("etcd-v2")
    server = EtcdServer(folder, "3.4", arguments=("--enable-v2",))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="module")
def dropped(v2: EtcdServer, newest_etcd: EtcdServer) -> dict[str, Any]:
    return reports(
        "tests.integration.rendezvous.dropped_handlers", f"127.0.0.1:{v2.port}", newest_etcd.url
    )


@pytest.fixture(scope="module")
def forked(newest_etcd: EtcdServer) -> dict[str, Any]:
    return reports("tests.integration.rendezvous.forked_handlers", newest_etcd.url)


@pytest.mark.parametrize("case", CASES)
def test_dropped_handler_is_released_with_last_reference(
    dropped: dict[str, Any], case: str
) -> None:
    found = dropped[case]
    assert found["worked"], "there was no thread to end"
    assert (found["gone"], found["threads"], found["ports"]) == (True, True, True)
    assert found["child"] == 0


def test_child_forked_before_first_use_has_rendezvous(forked: dict[str, Any]) -> None:
    assert forked["before"] == {"said": "(0, True)", "code": 0}


@pytest.mark.parametrize("call", REFUSED)
def test_child_forked_after_first_use_gets_error(forked: dict[str, Any], call: str) -> None:
    found = forked[call]
    assert found["said"].startswith("RendezvousUnsupportedError: process ")
    assert "gRPC does not work after a fork" in found["said"]
    assert found["code"] == 0


def test_child_without_rendezvous_calls_exits_normally(forked: dict[str, Any]) -> None:
    assert forked["nothing"] == {"said": "None", "code": 0}
    assert forked["get_run_id"] == {"said": "'used'", "code": 0}
    assert forked["shutdown"] == {"said": "False", "code": 0}
    assert forked["after its shutdown"] == {"said": "None", "code": 0}


def test_parent_continues_after_its_children(forked: dict[str, Any]) -> None:
    assert forked["parent"]["said"] == "(0, False)"
    assert forked["again"]["said"] == "(2, True)"
