"""Listeners that strangers flood with connections and bytes: memory, and service of others.

Strangers connect from other addresses of the loopback network than honest peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from elasticjob_agent.status_server import serve_status
from elasticjob_launcher.proof import Peer
from elasticjob_operator.replica.health import Health, serve_health
from elasticjob_rendezvous.links import dial, wire
from elasticjob_rendezvous.links.server import CAPS, PeerServer
from elasticjob_rendezvous.protocol.effects import Link
from elasticjob_rendezvous.protocol.events import Event, LinkUp, PeerUp
from elasticjob_rendezvous.tcpstore import StoreGone, TCPStore
from elasticjob_rendezvous.tcpstore.server import MAX_STORE_BYTES, MAX_TRANSIT_BYTES
from elasticjob_rendezvous.tcpstore.wire import Query, block, hello, query, stored
from tests.integration.etcd_server import Ports

KEY = b"k" * 32
SECONDS = 60.0
MIB = 1024 * 1024
LONG = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(port: int, source: str = "127.0.0.2") -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", port), timeout=SECONDS, source_address=(source, 0)
    )


def closed(sock: socket.socket) -> bool:
    """Return True if the server has closed this connection; drop what it sent."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.asynccontextmanager
async def silent(
    port: int, count: int, source: str = "127.0.0.2"
) -> AsyncIterator[list[socket.socket]]:
    """Hold connections on which nothing is sent."""

    def dialled() -> list[socket.socket]:
        return [connected(port, source) for _ in range(count)]

    made = await asyncio.to_thread(dialled)
    try:
        yield made
    finally:
        for sock in made:
            sock.close()


@contextlib.asynccontextmanager
async def coordinator() -> AsyncIterator[tuple[int, list[Event]]]:
    events: list[Event] = []
    server = PeerServer("id-a", KEY, events.append, "127.0.0.1", lambda: 1)
    port = await server.start()
    try:
        yield port, events
    finally:
        await server.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def test_member_links_while_a_stranger_holds_silent_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with coordinator() as (port, events), silent(port, 3 * CAPS.per_address) as flood:
            heard: list[Event] = []
            link = Link("id-a", "s1", "127.0.0.1", port)
            task = asyncio.create_task(
                dial.hold_link(link, "id-b", "s2", lambda: KEY, heard.append, lambda: (), 0.0)
            )
            await until(lambda: any(isinstance(event, PeerUp) for event in events) and heard)
            assert heard[0] == LinkUp("id-a", "s1"), "at the first attempt"
            assert sum(not closed(sock) for sock in flood) <= CAPS.per_address
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(scenario())
    lines = [one for one in caplog.records if "refused a connection" in one.getMessage()]
    assert 0 < len(lines) < 20, "hundreds of refusals"


def test_burst_of_members_from_many_addresses_is_linked_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More members than unproven connections have places: none is refused, all wait for theirs."""
    count = CAPS.unproven + 100
    linked: list[asyncio.StreamWriter] = []

    async def member(port: int, number: int) -> None:
        source = f"127.1.{number // 250}.{number % 250 + 1}"
        link, me = Link("id-a", "s1", "127.0.0.1", port), Peer(f"m-{number}", "s")
        while True:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(source, 0)
            )
            try:
                await dial._greet(link, me, KEY, reader, writer, wire.LINK_TIMES)
                await wire.read_line(reader, SECONDS)
            except (OSError, EOFError, TimeoutError):  # a busy machine; members dial again
                writer.close()
            else:
                linked.append(writer)
                return

    async def scenario() -> None:
        async with coordinator() as (port, _), asyncio.timeout(SECONDS):
            await asyncio.gather(*(member(port, number) for number in range(count)))
            for writer in linked:
                writer.close()

    asyncio.run(scenario())
    assert len(linked) == count
    assert "refused" not in caplog.text


async def page(port: int, path: str) -> bytes:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    return answer


def test_status_and_health_answer_beside_silent_connections() -> None:
    async def scenario() -> None:
        held = Ports(3)
        ports = held.numbers
        health = Health(ready=True)
        async with (
            serve_status(cast(Any, None), "127.0.0.1", ports[0], None),
            serve_health(health, ports[1], lambda: b"", ports[2]),
        ):
            held.close()
            for port, path in zip(ports, ("/live", "/readyz", "/metrics"), strict=True):
                async with silent(port, 600) as flood:
                    assert b"200 OK" in await page(port, path), path
                    assert sum(not closed(sock) for sock in flood) <= 64

    asyncio.run(scenario())


def test_silent_connection_is_closed_by_every_listener() -> None:
    """The launcher's probe server is tested in `tests/integration/launcher/test_probe.py`."""

    async def until_closed(name: str, port: int, seconds: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(seconds + SECONDS):
                while await reader.read(4096):  # a listener may speak first
                    pass
        except TimeoutError:
            pytest.fail(f"{name} keeps a silent connection for more than {seconds} s")
        finally:
            writer.close()

    async def scenario() -> None:
        held = Ports(3)
        ports = held.numbers
        made = Store()
        try:
            async with (
                coordinator() as (links, _),
                serve_status(cast(Any, None), "127.0.0.1", ports[0], None),
                serve_health(Health(ready=True), ports[1], lambda: b"", ports[2]),
            ):
                held.close()
                await asyncio.gather(
                    until_closed("links", links, wire.LINK_TIMES.handshake_seconds),
                    until_closed("status", ports[0], 5),
                    until_closed("health", ports[1], 5),
                    until_closed("metrics", ports[2], 5),
                    until_closed("store", made.port, 10),
                )
        finally:
            made.close()

    asyncio.run(scenario())


STORE = """
import sys
from elasticjob_rendezvous.tcpstore import TCPStoreServer
server = TCPStoreServer("127.0.0.1")
print(server.port, flush=True)
sys.stdin.read()
"""


class Store:
    """Store in a process of its own, whose memory a test measures."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STORE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


@pytest.fixture
def honest(store: Store) -> Iterator[TCPStore]:
    client = TCPStore("127.0.0.1", store.port, LONG)
    client.set("kept", "value")
    yield client
    client.close()


def stranger(store: Store) -> socket.socket:
    """Return a connection that speaks the store's protocol."""
    sock = connected(store.port)
    sock.sendall(hello(7))
    assert sock.recv(4)
    return sock


def served(client: TCPStore) -> None:
    assert client.get("kept") == b"value"
    assert client.add("counter", 1) > 0


def test_appended_bytes_have_a_total(store: Store, honest: TCPStore) -> None:
    before = store.peak_bytes
    refused = 0
    for number in range(40):
        client = TCPStore("127.0.0.1", store.port, LONG)
        try:
            client.append(f"big-{number % 3}", b"x" * (4 * MIB))
            client.num_keys()
        except StoreGone:
            refused += 1
        client.close()
    assert refused >= 40 - MAX_STORE_BYTES // (4 * MIB)
    assert store.peak_bytes - before < MAX_STORE_BYTES + 3 * MAX_TRANSIT_BYTES + 32 * MIB
    assert honest.get("kept") == b"value"
    assert honest.delete_key("big-0")
    served(honest)


def test_unfinished_values_have_a_total(store: Store, honest: TCPStore) -> None:
    before = store.peak_bytes
    part = query(Query.SET, block(stored("big"))) + (8 * MIB).to_bytes(8, "little")
    flood = [stranger(store) for _ in range(60)]
    for sock in flood:
        sock.sendall(part)
        sock.setblocking(False)
    rest = bytes(MIB)
    for _ in range(8):
        for sock in flood:
            with contextlib.suppress(BlockingIOError):
                sock.send(rest[: MIB - 1])
    served(honest)
    assert store.peak_bytes - before < 3 * MAX_TRANSIT_BYTES
    for sock in flood:
        sock.close()
    honest.set("large", b"y" * MIB)
    assert len(honest.get("large")) == MIB


def test_answers_that_nobody_reads_have_a_total(store: Store, honest: TCPStore) -> None:
    honest.set("large", b"y" * (4 * MIB))
    before = store.peak_bytes
    flood = [stranger(store) for _ in range(60)]
    for sock in flood:
        sock.sendall(query(Query.GET, block(stored("large"))) * 4)
    many = query(Query.MULTI_GET, (1000).to_bytes(8, "little"), block(stored("large")) * 1000)
    flood[0].sendall(many)
    served(honest)
    assert store.peak_bytes - before < 3 * MAX_TRANSIT_BYTES
    for sock in flood:
        sock.close()
    assert len(honest.get("large")) == 4 * MIB


def test_connections_to_store_of_one_stranger_take_bounded_memory(
    store: Store, honest: TCPStore
) -> None:
    before = store.peak_bytes
    flood = [connected(store.port) for _ in range(3000)]
    served(honest)
    newcomer = TCPStore("127.0.0.1", store.port, LONG)
    served(newcomer)
    newcomer.close()
    assert sum(not closed(sock) for sock in flood) <= 512
    assert store.peak_bytes - before < 32 * MIB
    for sock in flood:
        sock.close()


def test_large_states_are_exchanged_by_many_clients_at_once(store: Store) -> None:
    """A rendezvous of thousands of nodes: compare-and-set of its state by all of them."""
    clients = [TCPStore("127.0.0.1", store.port, LONG) for _ in range(64)]
    state = "s" * MIB
    clients[0].compare_set("state", "", state)
    wrong = "t" * MIB

    def attempt(client: TCPStore) -> bool:
        return bytes(client.compare_set("state", wrong, wrong)) == state.encode()

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(attempt, clients))
    for client in clients:
        client.close()


def test_many_clients_wait_for_many_keys(store: Store) -> None:
    keys = [f"node-{number}/address" for number in range(300)]
    clients = [TCPStore("127.0.0.1", store.port, LONG) for _ in range(100)]
    before = store.peak_bytes
    threads = [threading.Thread(target=client.wait, args=(keys,)) for client in clients]
    for thread in threads:
        thread.start()
    writer = TCPStore("127.0.0.1", store.port, LONG)
    for key in keys:
        writer.set(key, "10.0.0.1")
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert store.peak_bytes - before < 32 * MIB
    for client in (*clients, writer):
        client.close()
