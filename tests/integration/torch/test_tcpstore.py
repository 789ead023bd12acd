"""TCPStore's protocol: ElasticJob's client and server against torch's, in all combinations."""

from __future__ import annotations

import contextlib
import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as torch_distributed

from elasticjob_rendezvous.tcpstore import StoreGone, StoreTimeout, TCPStore, TCPStoreServer

LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=300)
Dial = Callable[[], Any]


def theirs(port: int, **options: Any) -> Any:
    return torch_distributed.TCPStore(
        "127.0.0.1", port, wait_for_workers=False, timeout=LONG, **options
    )


class Clients:
    """Factory of ElasticJob's clients, which it closes after the test."""

    def __init__(self) -> None:
        self.made: list[TCPStore] = []

    def __call__(self, port: int) -> TCPStore:
        self.made.append(TCPStore("127.0.0.1", port, LONG))
        return self.made[-1]


@pytest.fixture
def ours() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    for client in clients.made:
        client.close()


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    made = TCPStoreServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture(params=["ours-ours", "ours-libuv", "ours-plain", "torch-ours"])
def dial(request: pytest.FixtureRequest, ours: Clients) -> Iterator[Dial]:
    """Yield a function that makes clients of one server; the kinds are client-server."""
    client, _, host = request.param.partition("-")
    if host == "ours":
        made = TCPStoreServer("127.0.0.1")
        yield lambda: ours(made.port) if client == "ours" else theirs(made.port)
        made.close()
        return
    hosting = theirs(0, is_master=True, use_libuv=host == "libuv")
    yield functools.partial(ours, hosting.port)


def timeouts() -> tuple[type[Exception], ...]:
    return (StoreTimeout, torch_distributed.DistStoreError)


def test_values_are_shared_between_clients(dial: Dial) -> None:
    one, other = dial(), dial()
    one.set("a", "text")
    assert other.get("a") == b"text"
    binary = bytes(range(256)) * 5000  # more than one segment
    one.set("b", binary.decode("latin-1").encode("utf-8"))
    assert other.get("b").decode("utf-8").encode("latin-1") == binary
    one.set("empty", "")
    assert other.get("empty") == b""
    one.append("a", "s")
    assert other.get("a") == b"texts"
    one.multi_set(["x", "y"], ["1", "2"])
    assert other.multi_get(["x", "a", "y"]) == [b"1", b"texts", b"2"]


def test_numbers_are_stored_as_text(dial: Dial) -> None:
    one, other = dial(), dial()
    assert one.add("n", 3) == 3
    assert other.add("n", -5) == -2
    assert one.get("n") == b"-2"
    one.set("m", "40")
    assert one.add("m", 2) == 42


def test_compare_set_replaces_expected_value_only(dial: Dial) -> None:
    one, other = dial(), dial()
    assert one.compare_set("k", "", "first") == b"first"
    assert other.compare_set("k", "", "second") == b"first"
    assert other.compare_set("k", "first", "second") == b"second"
    assert one.get("k") == b"second"
    assert one.compare_set("absent", "x", "y") == b"x"
    assert not one.check(["absent"])


def test_check_and_num_keys_report_existing_keys(dial: Dial) -> None:
    one, other = dial(), dial()
    one.set("a", "1")
    before = one.num_keys()
    one.set("b", "1")
    assert one.check(["a", "b"])
    assert other.num_keys() == before + 1
    assert not other.check(["a", "c"])
    assert other.delete_key("a")
    assert not other.delete_key("a")
    assert not one.check(["a"])


@pytest.mark.parametrize("dial", ["ours-ours", "ours-libuv"], indirect=True)
def test_list_keys_returns_keys(dial: Dial) -> None:
    one, other = dial(), dial()
    one.multi_set(["a", "b/c"], ["1", "2"])
    assert {"a", "b/c"} <= set(other.list_keys())
    other.delete_key("a")
    assert "a" not in one.list_keys()


def test_torch_client_lists_keys_of_native_server(server: TCPStoreServer, ours: Clients) -> None:
    ours(server.port).multi_set(["a", "b/c"], ["1", "2"])
    # In a process of its own: torch holds Python's lock meanwhile, which our server needs.
    code = (
        "import sys, torch.distributed as distributed\n"
        "store = distributed.TCPStore('127.0.0.1', int(sys.argv[1]), wait_for_workers=False)\n"
        "print(*sorted(store.list_keys()))"
    )
    command = [sys.executable, "-c", code, str(server.port)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert told.stdout == "a b/c\n"


def test_wait_ends_with_last_key(dial: Dial) -> None:
    one, other = dial(), dial()
    one.set("a", "1")
    waited = threading.Event()

    def wait() -> None:
        other.wait(["a", "b", "c"], LONG)
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.set("b", "1")
    assert one.num_keys() >= 2
    assert not waited.is_set()
    one.add("c", 1)
    thread.join(60)
    assert waited.is_set()


def test_timed_out_wait_is_cancelled(dial: Dial) -> None:
    one, other = dial(), dial()
    for _ in range(2):
        with pytest.raises(timeouts()):
            one.wait(["never"], SHORT)
    one.set_timeout(SHORT)
    with pytest.raises(timeouts()):
        one.get("never")
    other.set("never", "now")
    assert one.get("never") == b"now", "the connection still answers what it is asked"


def test_concurrent_additions_of_clients_are_exact(dial: Dial) -> None:
    def work(_: int) -> set[int]:
        store = dial()
        return {store.add("n", 1) for _ in range(25)}

    with ThreadPoolExecutor(12) as pool:
        seen = list(pool.map(work, range(12)))
    assert set.union(*seen) == set(range(1, 301))


class TestServer:
    def test_closed_server_is_detected_and_successor_is_found(self, ours: Clients) -> None:
        first = TCPStoreServer("127.0.0.1")
        store = ours(first.port)
        store.set("k", "v")
        first.close()
        assert not store.connected
        with pytest.raises(StoreGone, match="cannot be reached"):
            store.check(["k"])
        second = TCPStoreServer("127.0.0.1", first.port)
        assert not store.check(["k"]), "the successor has none of the keys"
        assert store.connections == 2
        second.close()

    def test_waiting_client_is_woken_by_server_close(
        self, server: TCPStoreServer, ours: Clients
    ) -> None:
        store = ours(server.port)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["never"], LONG)
            while server.waiting == 0:
                time.sleep(0.01)
            server.close()
            with pytest.raises(StoreGone):
                waiting.result(60)

    def test_invalid_connections_are_closed(self, server: TCPStoreServer, ours: Clients) -> None:
        store = ours(server.port)
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00\x00\x00\x00\x00\x00",
            b"\x00\xce\xf7\x85<\xff",
            b"\x00\xce\xf7\x85<\x01" + b"\xff" * 8,
        ):
            with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
                stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(10) == b""
        store.set("text", "no number")
        with pytest.raises(StoreGone):
            store.add("text", 1)
        assert store.get("text") == b"no number"

    def test_server_detects_departure_of_last_client(
        self, server: TCPStoreServer, ours: Clients
    ) -> None:
        assert server.drained(0)
        store = ours(server.port)
        assert not server.drained(0.05)
        store.close()
        assert server.drained(60)
        with pytest.raises(StoreGone):
            store.get("k")

    def test_port_in_use_is_an_error(self, server: TCPStoreServer) -> None:
        with pytest.raises(OSError, match="in use"):
            TCPStoreServer("127.0.0.1", server.port)


class TestClient:
    def test_refused_connection_is_an_error(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        with pytest.raises(StoreGone, match=f"127.0.0.1:{port} cannot be reached"):
            TCPStore("127.0.0.1", port, SHORT)

    def test_client_waits_for_late_server(self, ours: Clients) -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(ours, port)
            late = TCPStoreServer("127.0.0.1", port)
            early.result(60).set("k", "v")
        late.close()

    def test_other_server_on_port_is_an_error(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:

            def answer() -> None:
                connection, _ = other.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(StoreGone, match="not a TCPStore"):
                TCPStore("127.0.0.1", other.getsockname()[1], timedelta())
            thread.join(60)


@pytest.mark.parametrize("host", ["node..svc", "x" * 64 + ".svc"])
def test_invalid_name_of_the_host_is_reported(host: str) -> None:
    with pytest.raises(StoreGone, match="is not the name of a host"):
        TCPStore(host, 29400, timedelta(seconds=0))
