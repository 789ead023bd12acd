"""Client errors when etcd is absent, hangs, dies half-way, or is another program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.endpoints import Link, Links
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    InvalidConfiguration,
    LeaseLost,
    NotEtcd,
    Unavailable,
)
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.watches import drained, events_of, next_events, opened
from tests.integration.etcd_server import EtcdServer, Ports, wait_until
from tests.integration.faulty_servers import Handler, Proxy, garbage, http, serving, silence
from tests.paths import ROOT


def first() -> float:
    """Return zero: begin with the first endpoint, and wait the shortest back-off."""
    return 0.0


@pytest.fixture
def dead_port() -> Iterator[int]:
    ports = Ports(1)
    try:
        yield ports.numbers[0]
    finally:
        ports.close()


def test_absent_server_is_unavailable_within_timeout(dead_port: int) -> None:
    async def main() -> None:
        url = f"http://127.0.0.1:{dead_port}"
        requests: tuple[Callable[[Client], Awaitable[object]], ...] = (
            lambda one: one.range(Range("/k")),
            lambda one: one.put(Put("/k", b"")),
            lambda one: one.grant(5),
        )
        async with (
            Client([url], request_timeout_seconds=0.5) as client,
            Client([url], request_timeout_seconds=60) as patient,
        ):
            for request in requests:
                waiting = asyncio.ensure_future(request(patient))
                await asyncio.sleep(0.05)
                with pytest.raises(Unavailable, match=url) as caught:
                    await request(client)
                assert "Connection refused" in str(caught.value)
                assert not waiting.done(), "the timeout is the client's own"
                waiting.cancel()
                await asyncio.wait((waiting,))
            with pytest.raises(Unavailable):
                await drained(client.watch([Range("/")], 0))

    asyncio.run(main())


def test_unresolvable_name_is_unavailable() -> None:
    async def main() -> None:
        async with Client(["nowhere.invalid:2379"], request_timeout_seconds=0.5) as client:
            with pytest.raises(Unavailable, match=r"nowhere\.invalid"):
                await client.put(Put("/k", b""))

    asyncio.run(main())


@pytest.mark.parametrize("handler", [garbage, http])
def test_other_server_is_reported_as_not_etcd(handler: Handler) -> None:
    async def main() -> None:
        async with serving(handler) as address, Client([address]) as client:
            with pytest.raises(NotEtcd, match=address):
                await client.range(Range("/k"))
            with pytest.raises(NotEtcd):
                await client.put(Put("/k", b""))
            with pytest.raises(NotEtcd):
                await drained(client.watch([Range("/")], 0))

    asyncio.run(main())


def test_silent_server_is_unavailable() -> None:
    """Writes fail with the same error: without a connection nothing was sent."""

    async def main() -> None:
        async with (
            serving(silence) as address,
            Client([address], request_timeout_seconds=0.4) as client,
        ):
            for request in (client.range(Range("/k")), client.put(Put("/k", b""))):
                with pytest.raises(Unavailable):
                    await request
            with pytest.raises(Unavailable):
                await drained(client.watch([Range("/")], 0))

    asyncio.run(main())


def test_requests_use_the_working_endpoint(
    newest_etcd: EtcdServer, prefix: str, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    failed = Links.failed

    async def recorded(links: Links, link: Link) -> None:
        left.append(link.endpoint.url)
        await failed(links, link)

    monkeypatch.setattr(Links, "failed", recorded)

    async def main() -> None:
        async with serving(garbage) as wrong, serving(silence) as silent:
            endpoints = [f"127.0.0.1:{dead_port}", wrong, silent, newest_etcd.url]
            async with Client(endpoints, random=first, request_timeout_seconds=16) as client:
                revision = await client.put(Put(f"{prefix}k", b""))
                others = [f"http://{one}" for one in endpoints[:-1]]
                assert list(dict.fromkeys(left)) == others
                left.clear()
                assert (await client.range(Range(f"{prefix}k"))).kvs[0].mod_revision == revision
                (event,) = await events_of(client.watch([Range(prefix, True)], revision), 1)
                assert event.mod_revision == revision
                assert left == [], "it must stay with the one that works"

    asyncio.run(main())


def test_write_with_lost_reply_is_ambiguous_and_not_repeated(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        proxy = Proxy(etcd.port)
        async with (
            serving(proxy.handle) as address,
            Client([address]) as client,
            Client([etcd.url]) as observer,
        ):
            start = (await client.range(Range(prefix))).revision
            proxy.swallow = True
            async with aclosing(observer.watch([Range(prefix, True)], start + 1)) as watch:
                await opened(watch)
                writing = asyncio.create_task(client.put(Put(f"{prefix}k", b"1")))
                await next_events(watch, 1)  # it is applied, and its reply lost
                proxy.swallow = False
                proxy.cut()
                with pytest.raises(Ambiguous, match="put"):
                    await writing
            found = await client.range(Range(f"{prefix}k"))  # the client recovers by itself
            assert found.kvs[0].create_revision == found.kvs[0].mod_revision > start

    asyncio.run(main())


def test_hung_txn_is_ambiguous_but_grant_and_read_are_not(
    newest_etcd: EtcdServer, prefix: str
) -> None:
    async def main() -> None:
        proxy = Proxy(newest_etcd.port)
        async with (
            serving(proxy.handle) as address,
            Client([address], request_timeout_seconds=1) as client,
        ):
            await client.range(Range(prefix))
            proxy.swallow = True
            absent = Compare(f"{prefix}k", Target.CREATE, 0)
            with pytest.raises(Ambiguous, match="txn"):
                await client.txn(Txn((absent,), (Put(f"{prefix}k", b""),)))
            with pytest.raises(Unavailable):
                await client.txn(Txn((absent,), (Range(f"{prefix}k"),)))
            with pytest.raises(Unavailable):
                await client.grant(5)
            with pytest.raises(Unavailable):
                await client.keep_alive(1)

    asyncio.run(main())


@pytest.mark.parametrize("cut", [False, True])
def test_read_with_lost_reply_is_answered_by_next_endpoint(
    newest_etcd: EtcdServer, prefix: str, cut: bool
) -> None:
    async def main() -> None:
        proxy = Proxy(newest_etcd.port)
        async with (
            serving(proxy.handle) as address,
            Client([address, newest_etcd.url], random=first, request_timeout_seconds=1) as client,
        ):
            lease = await client.grant(30)
            assert await client.keep_alive(lease.id) == 30
            proxy.swallow = True
            renewal = asyncio.create_task(client.keep_alive(lease.id))
            reading = asyncio.create_task(client.range(Range(prefix)))
            if cut:
                await asyncio.wait((renewal, reading), timeout=0.05)
                proxy.cut()
            assert await renewal == 30
            assert (await reading).kvs == ()

    asyncio.run(main())


def test_stopped_server_times_out_and_recovers(start_etcd: StartEtcd) -> None:
    server = start_etcd()

    async def main() -> None:
        async with Client([server.url], request_timeout_seconds=1) as client:
            lease = await client.grant(60)
            await client.keep_alive(lease.id)
            server.pause()
            with pytest.raises(Ambiguous):
                await client.put(Put("/k", b"1"))
            with pytest.raises(Unavailable):
                await client.range(Range("/k"))
            with pytest.raises(Unavailable):
                await client.keep_alive(lease.id)
            server.resume()
            assert (await client.range(Range("/k"))).count in (0, 1)
            assert await client.keep_alive(lease.id) == 60
            await client.put(Put("/k", b"2"))

    asyncio.run(main())


@pytest.mark.parametrize("version", ["3.4", "3.7"])
def test_client_watch_and_lease_survive_killed_server(start_etcd: StartEtcd, version: str) -> None:
    server = start_etcd(version)

    async def main() -> None:
        async with Client([server.url]) as client:
            lease = await client.grant(60)
            revision = await client.put(Put("/k", b"1", lease.id))
            cluster = (await client.status()).cluster_id
            watch = client.watch([Range("/", True)], revision + 1)
            await opened(watch)
            ended = asyncio.create_task(drained(watch))
            await client.keep_alive(lease.id)
            await asyncio.to_thread(server.kill)
            with pytest.raises(Unavailable):
                await ended
            reading = asyncio.create_task(client.range(Range("/k")))  # waits for the new server
            await asyncio.to_thread(server.start)
            await asyncio.wait((reading,), timeout=60)
            found = await client.range(Range("/k"))
            assert (found.cluster_id, found.kvs[0].value) == (cluster, b"1")
            assert await client.keep_alive(lease.id) == 60  # leases survive kill -9
            watch = client.watch([Range("/", True)], found.revision + 1)
            await opened(watch)
            await client.revoke(lease.id)
            assert (await events_of(watch, 1))[0].key == "/k"
            with pytest.raises(LeaseLost):
                await client.keep_alive(lease.id)

    asyncio.run(main())


def test_server_with_lost_data_is_detected(start_etcd: StartEtcd) -> None:
    server = start_etcd()

    async def main() -> None:
        async with Client([server.url]) as client:
            for _ in range(5):
                revision = await client.put(Put("/k", b""))
            cluster = (await client.range(Range("/k"))).cluster_id
            await asyncio.to_thread(server.kill)
            (server.folder / "data").rename(server.folder / "lost")
            await asyncio.to_thread(server.start)
            with pytest.raises(Unavailable, match="lost its data"):
                await drained(client.watch([Range("/k")], revision + 1))
            found = await client.range(Range("/k"))
            assert (found.kvs, found.revision < revision) == ((), True)
            assert found.cluster_id == cluster  # derived from the members' names and addresses

    asyncio.run(main())


def test_closing_client_ends_waiting_requests(newest_etcd: EtcdServer) -> None:
    async def main() -> None:
        proxy = Proxy(newest_etcd.port)
        async with serving(proxy.handle) as address:
            client = Client([address], request_timeout_seconds=5)
            await client.range(Range("/k"))
            proxy.swallow = True
            writing = asyncio.create_task(client.put(Put("/k", b"")))
            reading = asyncio.create_task(client.range(Range("/k")))
            await asyncio.wait((writing, reading), timeout=0.1)
            await client.aclose()
            with pytest.raises(Ambiguous):
                await writing
            with pytest.raises(Unavailable):
                await reading

    asyncio.run(main())


def test_request_cancelled_by_timeout_ends(newest_etcd: EtcdServer) -> None:
    async def main() -> None:
        proxy = Proxy(newest_etcd.port)
        async with serving(proxy.handle) as address, Client([address]) as client:
            await client.range(Range("/k"))
            proxy.swallow = True
            for request in (
                client.range(Range("/k")),
                client.put(Put("/k", b"")),
                client.keep_alive(1),
            ):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await request

    asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoints", "problem"),
    [
        ([], "at least one"),
        (["ftp://host:1"], "http or https"),
        (["http://host:port"], "port"),
        (["http://host:99999"], "Port out of range"),
        (["http://host:2379/v3"], "without a path"),
        (["http://"], "must name a host"),
        ([""], "must name a host"),
    ],
)
def test_invalid_endpoints_are_refused_at_once(endpoints: list[str], problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem):
        Client(endpoints)


def test_servers_end_with_their_parent_process(tmp_path: Path) -> None:
    """Guarantee of the test servers: kill -9 of the test process leaves nothing behind."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from tests.integration.etcd_server import EtcdServer\n"
        f"print(EtcdServer(Path({str(tmp_path)!r})).start().pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(60)
    parent.stdout.close()
    status = Path(f"/proc/{pid}/stat")
    wait_until(lambda: not status.exists() or ") Z " in status.read_text(), "etcd to die")
