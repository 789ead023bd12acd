"""Stores that answer late: no living member of ElasticJob's is removed from its round."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.dynamic.core.settings import KEEP_ALIVE_INTERVAL_SECONDS
from tests.integration.etcd_server import EtcdServer
from tests.integration.torch.dynamic_gang import Gang, Kind, Member, agree, join

OURS, TORCH = Kind.OURS, Kind.TORCH
TORCHS: dict[str, Any] = {
    "keep_alive_interval": KEEP_ALIVE_INTERVAL_SECONDS,
    "keep_alive_max_attempt": 3,
}
STALL_SECONDS = 8.0
BEFORE_BEAT_SECONDS = 0.7
"""Time between the stall's begin and the first heartbeats of a round."""


@contextmanager
def store_and_gang(
    store: str, folder: Path, nodes: int
) -> Iterator[tuple[Gang, Member | EtcdServer]]:
    """Return a gang, and its store's process with a method `signal`."""
    server = None
    if store == "etcd-v2":
        server = EtcdServer(folder, "3.4", arguments=["--enable-v2"]).start()
        gang = Gang("etcd-v2", f"127.0.0.1:{server.port}", nodes, nodes + 1)
    else:
        gang = Gang("tcp", "", nodes, nodes + 1)
    try:
        yield gang, gang.host if server is None else server
    finally:
        gang.close()
        if server is not None:
            server.close()


@pytest.mark.parametrize("store", ["tcp", "etcd-v2"])
@pytest.mark.parametrize("kinds", [[OURS] * 3, [OURS, OURS, TORCH]], ids=["ours", "mixed"])
def test_stall_of_store_removes_no_member_of_ours(
    store: str, kinds: list[Kind], tmp_path: Path
) -> None:
    """In the same stall, members of torch's remove themselves and each other."""
    with store_and_gang(store, tmp_path, len(kinds)) as (gang, host):
        members = gang.add(*kinds, **TORCHS)
        first = join(*members)
        joined = time.monotonic()
        agree(first)
        ours = members[: kinds.count(OURS)]
        addresses = {f"127.0.0.{number + 1}" for number in range(len(ours))}

        def check() -> None:
            """Poll as agents do."""
            for member in ours:
                waiting = member.call("waiting")
                assert addresses <= set(member.call("hosts"))
                assert waiting == 0 or TORCH in kinds

        stalls = joined + KEEP_ALIVE_INTERVAL_SECONDS - BEFORE_BEAT_SECONDS
        while time.monotonic() < stalls:
            check()
            time.sleep(0.2)
        host.signal(signal.SIGSTOP)
        asked = [member.start("waiting") for member in members]
        time.sleep(STALL_SECONDS)
        host.signal(signal.SIGCONT)
        for call in asked:
            call.result()
        ends = joined + 5 * KEEP_ALIVE_INTERVAL_SECONDS
        while time.monotonic() < ends:
            check()
            time.sleep(0.2)
