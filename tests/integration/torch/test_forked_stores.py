"""Stores and etcd v2 handlers in a forked child: each side keeps its connections."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import pytest

from elasticjob_rendezvous.tcpstore import TCPStore, TCPStoreServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.etcd_v2_rig import Run, StartRun, together

CHILD_SECONDS = 60


def in_child(work: Callable[[], object]) -> None:
    """Run the work in a fork, and fail if it fails there."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        code = 1
        try:
            work()
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    made = TCPStoreServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def store(server: TCPStoreServer) -> Iterator[TCPStore]:
    made = TCPStore("127.0.0.1", server.port, timedelta(seconds=10))
    yield made
    made.close()


def test_child_opens_its_own_store_connection(store: TCPStore) -> None:
    store.set("from", "parent")

    def work() -> None:
        assert store.get("from") == b"parent"
        store.set("from", "child")
        assert store.connected
        store.close()

    for _ in range(3):
        in_child(work)
        assert store.get("from") == b"child"
        store.set("from", "parent")
    assert store.connections == 1


def test_lock_held_by_another_thread_does_not_block_child(store: TCPStore) -> None:
    with store._lock:  # as a thread does that waits for a key
        in_child(lambda: store.set("key", "value"))
    assert store.get("key") == b"value"


def test_server_continues_after_child_closes_its_copy(
    server: TCPStoreServer, store: TCPStore
) -> None:
    in_child(server.close)
    assert store.num_keys() == 0


def test_dropped_server_releases_its_port() -> None:
    port = TCPStoreServer("127.0.0.1").port

    def is_free() -> bool:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return True
        return False

    wait_until(is_free, "the port to be free")


@pytest.fixture
def run(v2_etcd: EtcdServer, start_v2_run: StartRun) -> Run:
    return start_v2_run(v2_etcd)


def test_child_of_etcd_v2_member_shares_no_state(run: Run) -> None:
    member = run.ours(1, 1)
    together([member])
    rendezvous = member.rendezvous
    rendezvous._waiting.current()  # a stream is open

    def work() -> None:
        rendezvous._feed.close()
        assert not member.handler.is_closed()
        assert member.info is not None
        member.info.store.set("from", "child")

    for _ in range(3):
        in_child(work)
        assert member.handler.num_nodes_waiting() == 0
        assert member.info is not None
        assert member.info.store.get("from") == b"child"
    assert rendezvous._feed.failure is None
    assert rendezvous._feed._response is not None
