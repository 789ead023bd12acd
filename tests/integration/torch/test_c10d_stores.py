"""Stores of a c10d rendezvous: torch's TCPStore and FileStore, also with torch's own backend."""

from __future__ import annotations

import pickle
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.c10d import C10dRendezvousBackend, create_backend
from elasticjob_rendezvous.c10d.native import emptied
from elasticjob_rendezvous.c10d.stores import sharing
from elasticjob_rendezvous.dynamic import wire
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State, completed, redundant
from tests.integration.etcd_server import Ports
from tests.integration.torch.dynamic_gang import Failed, Gang, Kind, agree, join


def parameters(endpoint: str, **settings: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "run", 1, 4, **settings)


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a reserved free port; torch's server binds over it."""
    with ExitStack() as stack:
        ports = Ports(1)
        stack.callback(ports.close)
        yield ports.numbers[0]


@pytest.fixture(params=["tcp", "file"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[C10dRendezvousBackend, Any]:
    if request.param == "file":
        return create_backend(parameters(str(tmp_path / "store"), store_type="FILE "))
    return create_backend(parameters("localhost:0", is_host="true"))


def test_tokens_and_states_round_trip_on_real_store(
    made: tuple[C10dRendezvousBackend, Any],
) -> None:
    backend, store = made
    assert backend.get_state() is None
    assert backend.set_state(b"one", b"d3Jvbmc=") is None
    written = backend.set_state(b"one")
    assert written is not None
    assert written[2]
    assert backend.get_state() == written[:2]
    assert backend.set_state(b"two") == (*written[:2], False)
    second = backend.set_state(b"two", written[1])
    assert second is not None
    assert (second[0], second[2]) == (b"two", True)
    assert backend.set_state(b"three", written[1]) == (*second[:2], False)
    store.set("torch.rendezvous.run", "not base64!")
    with pytest.raises(RendezvousStateError):
        backend.get_state()


def test_torch_backend_shares_state(made: tuple[C10dRendezvousBackend, Any]) -> None:
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as torchs

    backend, store = made
    other = torchs.C10dRendezvousBackend(store, "run")
    ours = backend.set_state(b"ours")
    assert other.get_state() == ours[:2] if ours else None
    assert ours is not None
    theirs = other.set_state(b"theirs", ours[1])
    assert backend.get_state() == theirs[:2] if theirs else None
    assert backend.set_state(b"late", ours[1]) == (b"theirs", theirs[1] if theirs else None, False)


def test_torch_reads_and_rewrites_whole_state() -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    now = datetime.now(UTC)
    nodes = [NodeDesc(f"node-{number}", number, 0) for number in range(3)]
    alive = dict.fromkeys(nodes, now)
    state = completed(State(3, participants=dict.fromkeys(nodes, 0), last_heartbeats=alive))
    state = redundant(state, NodeDesc("spare", 1, 2), now)
    read = pickle.loads(wire.encode(state))
    assert isinstance(read, torchs._RendezvousState)
    assert read.participants == {
        torchs._NodeDesc(f"node-{number}", number, 0): number for number in range(3)
    }
    assert read.redundancy_list == {torchs._NodeDesc("spare", 1, 2)}
    assert wire.decode(pickle.dumps(read)) == state


def test_one_candidate_hosts_store_and_others_connect(port: int) -> None:
    gang = Gang("tcp", f"localhost:{port}", 4, 4)
    try:
        members = gang.add(*[Kind.OURS] * 3, Kind.TORCH, is_host=None)
        agree(join(*members))
    finally:
        gang.close()


def test_designated_host_does_not_connect_to_another_store(port: int) -> None:
    gang = Gang("tcp", f"127.0.0.1:{port}", 1, 4)
    try:
        gang.add(Kind.OURS, is_host=True)
        with pytest.raises(Failed, match="could not host") as failed:
            gang.add(Kind.OURS, is_host=True)
        assert failed.value.name == "RendezvousConnectionError"
    finally:
        gang.close()


def test_absent_host_raises_connection_error_within_read_timeout(port: int) -> None:
    with pytest.raises(RendezvousConnectionError, match=f"could not connect.*:{port}"):
        create_backend(parameters(f"127.0.0.1:{port}", is_host=False, read_timeout=1))


def test_file_store_without_path_uses_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend, _ = create_backend(parameters("", store_type="file"))
    assert backend.set_state(b"state") is not None
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_unwritable_file_store_raises_rendezvous_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RendezvousError, match="no temporary file"):
        create_backend(parameters("", store_type="file"))
    with pytest.raises(RendezvousConnectionError, match="no directory"):
        create_backend(parameters(str(tmp_path / "missing" / "file"), store_type="file"))


def test_only_keys_of_workers_are_deleted() -> None:
    backend, store = create_backend(parameters("127.0.0.1:0", is_host="true"))
    backend.set_state(b"state")
    store.set("torch.rendezvous.run.3/MASTER_PORT", "1")
    store.set("default_pg/0//cpu//0/1", "a stale address")
    emptied("run", "127.0.0.1", store.port)
    assert not store.check(["default_pg/0//cpu//0/1"])
    assert store.check(["torch.rendezvous.run.3/MASTER_PORT"])
    found = backend.get_state()
    assert found is not None
    assert found[0] == b"state"


@pytest.mark.parametrize("other", ["other", "run.1", "run.b", "run.1x/y", "run/1"])
def test_store_of_another_run_is_left_unchanged(other: str) -> None:
    _, store = create_backend(parameters("127.0.0.1:0", is_host="true"))
    store.set(f"torch.rendezvous.{other}", "its state")
    store.set("default_pg/0//cpu//0/1", "an address of whoever")
    with pytest.raises(RendezvousConnectionError, match="another run too"):
        emptied("run", "127.0.0.1", store.port)
    assert store.check(["default_pg/0//cpu//0/1"])


def test_absent_store_cannot_be_cleared(port: int) -> None:
    with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port}"):
        emptied("run", "127.0.0.1", port, timeout_seconds=1)


def test_silent_store_is_told_from_an_absent_one() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RendezvousTimeoutError, match="timed out"),
    ):
        emptied("run", "127.0.0.1", silent.getsockname()[1], timeout_seconds=0.2)


def test_tcp_store_serves_workers_of_mixed_gang_and_file_store_does_not(tmp_path: Path) -> None:
    given = parameters("localhost:0", is_host="true")
    _, store = create_backend(given)
    lasting = sharing(given, store).lasting
    assert lasting is not None
    assert (lasting.master_addr, lasting.master_port) == ("localhost", store.port)
    given = parameters(str(tmp_path / "store"), store_type="file")
    assert sharing(given, create_backend(given)[1]).lasting is None
