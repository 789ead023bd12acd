"""Watches: several ranges, order, resumption, compaction, silence."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Compacted, Unavailable
from elasticjob_rendezvous.protocol.kv import Delete, Deleted, KeyValue, Put, Range, Txn, WatchBatch
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.watches import drained, events_of, next_events, opened
from tests.integration.etcd_server import EtcdServer


def test_one_stream_watches_several_ranges(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            targets = [Range(f"{prefix}members/", True), Range(f"{prefix}round")]
            async with aclosing(client.watch(targets, 0)) as watch:
                start = await opened(watch)
                first = await client.put(Put(f"{prefix}members/a", b"1"))
                await client.put(Put(f"{prefix}round-not-this", b""))
                second = await client.put(Put(f"{prefix}round", b"2"))
                third = await client.txn(Txn((), (Delete(f"{prefix}members/a"),)))
                assert first > start
                assert await next_events(watch, 3) == [
                    KeyValue(f"{prefix}members/a", b"1", first, first),
                    KeyValue(f"{prefix}round", b"2", second, second),
                    Deleted(f"{prefix}members/a", third.revision),
                ]

    asyncio.run(main())


def test_watch_from_old_revision_delivers_whole_history_in_order(
    etcd: EtcdServer, prefix: str
) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            found = await client.range(Range(prefix, True))
            start = found.revision + 1
            revisions = []
            for turn in range(30):
                puts = tuple(Put(f"{prefix}{key}", b"%d" % turn) for key in range(40))
                revisions.append((await client.txn(Txn((), puts))).revision)
            batches: list[WatchBatch] = []
            async with (
                asyncio.timeout(60),
                aclosing(client.watch([Range(prefix, True)], start)) as watch,
            ):
                assert await anext(watch) == WatchBatch(start - 1, (), found.cluster_id)
                while sum(len(batch.events) for batch in batches) < 1200:
                    batches.append(await anext(watch))
            seen = [event.mod_revision for batch in batches for event in batch.events]
            assert seen == [revision for revision in revisions for _ in range(40)]
            for batch in batches:
                assert batch.revision == batch.events[-1].mod_revision
                assert batch.cluster_id == found.cluster_id
                assert len(batch.events) % 40 == 0

    asyncio.run(main())


def test_two_watches_and_requests_share_one_client(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with (
            Client([etcd.url]) as client,
            aclosing(client.watch([Range(f"{prefix}a")], 0)) as one,
            aclosing(client.watch([Range(f"{prefix}b")], 0)) as other,
        ):
            await opened(one)
            await opened(other)
            await asyncio.gather(
                *(client.put(Put(f"{prefix}{key}", b"")) for key in ("a", "b") * 10)
            )
            assert {event.key for event in await next_events(one, 10)} == {f"{prefix}a"}
            assert {event.key for event in await next_events(other, 10)} == {f"{prefix}b"}

    asyncio.run(main())


def test_start_below_compaction_is_refused(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            start = await client.put(Put(f"{prefix}k", b"1"))
            for _ in range(3):
                last = await client.put(Put(f"{prefix}k", b"2"))
            await asyncio.to_thread(etcd.ctl, "compact", str(last))
            with pytest.raises(Compacted) as caught:
                await drained(client.watch([Range(f"{prefix}other"), Range(prefix, True)], start))
            assert caught.value.compact_revision == last
            assert etcd.url in str(caught.value)
            (event,) = await events_of(client.watch([Range(prefix, True)], last), 1)
            assert event.mod_revision == last

    asyncio.run(main())


def test_current_watch_survives_compaction(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with (
            Client([etcd.url]) as client,
            aclosing(client.watch([Range(prefix, True)], 0)) as watch,
        ):
            await opened(watch)
            await client.put(Put(f"{prefix}k", b"1"))
            last = await client.put(Put(f"{prefix}k", b"2"))
            await next_events(watch, 2)
            await asyncio.to_thread(etcd.ctl, "compact", str(last))
            await client.put(Put(f"{prefix}k", b"3"))
            (event,) = await next_events(watch, 1)
            assert isinstance(event, KeyValue)
            assert event.value == b"3"

    asyncio.run(main())


def test_lagging_watch_reports_compaction(start_etcd: StartEtcd) -> None:
    """The watch is not read while more is written, and compacted, than all buffers hold."""
    server = start_etcd()

    async def main() -> None:
        async with Client([server.url]) as lazy, Client([server.url]) as writer:
            watch = lazy.watch([Range("/k")], 0)
            await opened(watch)
            value = bytes(500_000)
            for _ in range(200):
                last = await writer.put(Put("/k", value))
            await asyncio.to_thread(server.ctl, "compact", str(last))
            with pytest.raises(Compacted) as caught:
                await drained(watch)
            assert caught.value.compact_revision == last

    asyncio.run(main())


def test_start_beyond_server_revision_is_refused(etcd: EtcdServer, prefix: str) -> None:
    """After a loss of all data revisions restart, and the watch would be silent."""

    async def main() -> None:
        async with Client([etcd.url]) as client:
            revision = (await client.range(Range(prefix))).revision
            with pytest.raises(Unavailable, match="lost its data"):
                await drained(client.watch([Range(prefix, True)], revision + 1000))

    asyncio.run(main())


def test_idle_watch_probes_the_server(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with (
            Client([etcd.url], watch_idle_seconds=0.1) as client,
            aclosing(client.watch([Range(prefix, True)], 0)) as watch,
        ):
            await opened(watch)
            following = asyncio.create_task(next_events(watch, 1))
            await asyncio.wait((following,), timeout=1.0)  # several idle spans pass
            assert not following.done()
            await client.put(Put(f"{prefix}k", b""))
            assert (await following)[0].key == f"{prefix}k"

    asyncio.run(main())


def test_watch_on_hung_server_ends(start_etcd: StartEtcd) -> None:
    server = start_etcd()

    async def main() -> None:
        async with Client(
            [server.url], watch_idle_seconds=0.3, request_timeout_seconds=0.5
        ) as client:
            watch = client.watch([Range("/", True)], 0)
            await opened(watch)
            server.pause()
            with pytest.raises(Unavailable, match="silent"):
                await drained(watch)
            server.resume()
            assert (await client.range(Range("/k"))).kvs == ()

    asyncio.run(main())


def test_closing_client_ends_its_watches(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        client = Client([newest_etcd.url])
        watch = client.watch([Range(prefix, True)], 0)
        await opened(watch)
        ending = asyncio.create_task(drained(watch))
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(Unavailable):
            await ending

    asyncio.run(main())
