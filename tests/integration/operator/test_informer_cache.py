"""Operator's informer cache of the rendezvous, on a real etcd with outages and losses of data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.rendezvous.informer_cache import (
    PAGE_KEYS,
    Contended,
    InformerCache,
    close,
    remove_members,
    write_params,
)
from elasticjob_operator.rendezvous.record_store import UNKNOWN_NODES, quota_of
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.kv import Delete, Put, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import ROOT, Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.etcd_server import EtcdServer

ONE = job_prefix("default", "uid-one", 1)
TWO = job_prefix("default", "uid-two", 1)
BOUNDS = RendezvousParams(min_nodes=1, max_nodes=4)
ROUND = Round(3, RoundState.FINAL, Cause(CauseKind.JOIN, ("b",)), nodes=2, world_size=2)
STOPPED = Outcome(OutcomeKind.STOPPED, "Suspended")


@asynccontextmanager
async def mirrored(server: EtcdServer) -> AsyncIterator[tuple[Client, InformerCache]]:
    """Yield a client and a running informer cache."""
    async with Client([server.url], request_timeout_seconds=2.0) as client:
        cache = InformerCache(client)
        running = asyncio.create_task(cache.run())
        try:
            yield client, cache
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(cache: InformerCache, condition: Callable[[], Any]) -> list[str]:
    """Follow the changes until the condition holds; return the prefixes reported meanwhile."""
    told: list[str] = []
    async with asyncio.timeout(60):
        changes = cache.changes()
        while not condition():
            told.append(await anext(changes))
    return told


async def put(client: Client, key: str, record: object) -> int:
    return await client.put(Put(key, encode(record)))


@pytest.fixture
def server(start_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    return start_etcd()


def test_cache_reports_changed_jobs_and_their_records(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            assert cache.records(ONE) is None  # nothing is known before the first read
            await put(client, Keys(ONE).round, ROUND)
            async with asyncio.timeout(60):
                assert await anext(cache.changes()) == ONE
            found = cache.records(ONE)
            assert found is not None
            assert found.round == ROUND

            told = asyncio.create_task(until(cache, lambda: TWO in cache.prefixes()))
            await put(client, Keys(TWO).session("b", "s"), Member("b", "s", "b", "127.0.0.1", 1))
            assert set(await told) == {TWO}
            two = cache.records(TWO)
            assert two is not None
            assert [member.id for member in two.members] == ["b"]

            await client.txn(Txn((), (Delete(ONE, prefix=True),)))
            await until(cache, lambda: ONE not in cache.prefixes())
            gone = cache.records(ONE)
            assert gone is not None
            assert gone.round is None

    asyncio.run(main())


def test_write_can_be_awaited(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            revision = 0
            for size in range(1, 20):
                bounds = RendezvousParams(min_nodes=1, max_nodes=size)
                revision = await write_params(client, ONE, bounds, revision)
                assert await cache.reached(revision, 5.0)
                found = cache.records(ONE)
                assert found is not None
                assert (found.bounds, found.bounds_revision) == (bounds, revision)
            assert not await cache.reached(revision + 1, 0.05)

    asyncio.run(main())


def test_parameters_are_written_only_over_those_that_were_read(server: EtcdServer) -> None:
    """A former leader that was paused between reading and writing changes nothing."""

    async def main() -> None:
        async with mirrored(server) as (client, cache):
            first = await write_params(client, ONE, BOUNDS, 0)
            newer = replace(BOUNDS, max_nodes=3)
            second = await write_params(client, ONE, newer, first)
            for stale in (0, first):
                with pytest.raises(Contended, match="changed since they were read"):
                    await write_params(client, ONE, replace(BOUNDS, max_nodes=2), stale)
            assert await write_params(client, ONE, newer, first) == second, "repeated"
            assert await cache.reached(second, 5.0)
            found = cache.records(ONE)
            assert found is not None
            assert (found.bounds, found.bounds_revision) == (newer, second)
            malformed = await client.put(Put(Keys(ONE).bounds, b"{"))
            assert await cache.reached(malformed, 5.0)
            found = cache.records(ONE)
            assert found is not None
            assert (found.bounds, found.bounds_revision) == (None, malformed)
            await write_params(client, ONE, BOUNDS, malformed)

    asyncio.run(main())


def test_outage_empties_cache_and_recovery_fills_it(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            await put(client, Keys(ONE).round, ROUND)
            await until(cache, lambda: ONE in cache.prefixes())
            cluster = cache.cluster_id

            away = asyncio.create_task(until(cache, lambda: cache.records(ONE) is None))
            await asyncio.to_thread(server.kill)
            assert ONE in await away
            await asyncio.to_thread(server.start)
            await until(cache, lambda: cache.known)
            found = cache.records(ONE)
            assert found is not None
            assert (found.round, cache.cluster_id) == (ROUND, cluster)

            after = await put(client, Keys(TWO).round, ROUND)
            assert await cache.reached(after, 5.0)  # and it goes on watching

    asyncio.run(main())


def test_data_loss_empties_cache_and_is_reported(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            for _ in range(5):
                before = await put(client, Keys(ONE).round, ROUND)
            await until(cache, lambda: cache.revision >= before)

            await asyncio.to_thread(server.kill)
            await until(cache, lambda: not cache.known)
            await asyncio.to_thread(server.wipe)
            await asyncio.to_thread(server.start)
            await until(cache, lambda: cache.known)

            assert cache.prefixes() == ()
            assert cache.revision < before
            # At a revision that the lost store had passed already: a watch from there is silent.
            after = await put(client, Keys(TWO).round, ROUND)
            assert after < before
            await until(cache, lambda: TWO in cache.prefixes())

    asyncio.run(main())


def test_compaction_does_not_disturb_cache(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            await put(client, Keys(ONE).round, ROUND)
            await until(cache, lambda: ONE in cache.prefixes())
            for number in range(50):
                await put(client, Keys(TWO).bounds, RendezvousParams(1, 1 + number))
            last = await put(client, Keys(ONE).bounds, BOUNDS)
            await asyncio.to_thread(server.ctl, "compact", str(last))
            await client.txn(Txn((), (Delete(Keys(TWO).bounds),)))
            await until(cache, lambda: TWO not in cache.prefixes())
            found = cache.records(ONE)
            assert found is not None
            assert (found.round, found.bounds) == (ROUND, BOUNDS)

    asyncio.run(main())


def test_rendezvous_is_closed_from_outside(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            await put(client, Keys(ONE).round, ROUND)
            assert await close(client, ONE, STOPPED, utc_ms=5)
            assert not await close(client, ONE, Outcome(OutcomeKind.FAILED), utc_ms=6)
            assert await close(client, TWO, STOPPED, utc_ms=5)  # before any member came
            await until(cache, lambda: TWO in cache.prefixes())
            for prefix, number in ((ONE, 3), (TWO, 1)):
                found = cache.records(prefix)
                assert found is not None
                assert found.round is not None
                assert found.round.state is RoundState.CLOSED
                assert (found.round.number, found.round.outcome) == (number, STOPPED)

    asyncio.run(main())


def test_unknown_keys_below_root_are_ignored(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            await client.put(Put(ROOT + "stray", b"?"))
            await client.put(Put(Keys(ONE).round, b"not json"))
            await until(cache, lambda: ONE in cache.prefixes())
            assert cache.prefixes() == (ONE,)
            found = cache.records(ONE)
            assert found is not None
            assert found.round is None
            assert "another program may be writing" in found.malformed[0]

    asyncio.run(main())


def test_members_of_deleted_pods_are_removed(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, cache):
            keys = Keys(ONE)
            for index in range(150):
                name = f"m{index}"
                await put(client, keys.session(name, "s"), Member(name, "s", name, "127.0.0.1", 1))
            await put(client, keys.session("m1", "t"), Member("m1", "t", "m1", "127.0.0.1", 1))
            await put(client, Keys(TWO).session("m1", "s"), Member("m1", "s", "b", "127.0.0.1", 1))
            await remove_members(client, ONE, [f"m{index}" for index in range(1, 150)])
            await until(cache, lambda: len(members(cache, ONE)) == 1)
            assert (members(cache, ONE), members(cache, TWO)) == (["m0"], ["m1"])
            await remove_members(client, ONE, ["m1"])  # a repetition has no effect
            assert members(cache, ONE) == ["m0"]

    asyncio.run(main())


def members(cache: InformerCache, prefix: str) -> list[str]:
    found = cache.records(prefix)
    assert found is not None
    return [member.id for member in found.members]


async def write_junk(client: Client, prefix: str, count: int) -> None:
    for first in range(0, count, 100):
        numbers = range(first, min(first + 100, count))
        await client.txn(Txn((), tuple(Put(f"{prefix}junk/{n}", b"x") for n in numbers)))


def test_records_of_many_pages_are_read(server: EtcdServer) -> None:
    async def main() -> None:
        async with Client([server.url]) as client:
            await write_junk(client, ONE, 3 * PAGE_KEYS)
            await put(client, Keys(TWO).round, ROUND)
            cache = InformerCache(client)
            running = asyncio.create_task(cache.run())
            assert await cache.reached(1, 10.0)
            found = cache.records(TWO)
            assert found is not None
            assert found.round == ROUND
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_job_with_too_many_records_is_dropped_and_its_neighbour_is_read(
    server: EtcdServer,
) -> None:
    async def main() -> None:
        most = quota_of(UNKNOWN_NODES).keys
        async with mirrored(server) as (client, cache):
            await write_junk(client, ONE, most + 200)
            await until(cache, lambda: cache.exceeded("default", "uid-one"))
            await put(client, Keys(TWO).round, ROUND)
            await until(cache, lambda: TWO in cache.prefixes())
            assert cache.records(ONE) is None
        async with mirrored(server) as (client, cache):  # the same from the first read on
            assert await cache.reached(1, 10.0)
            assert cache.prefixes() == (TWO,)
            assert cache.exceeded("default", "uid-one") is not None

            cache.allow("default", "uid-one", 4 * UNKNOWN_NODES)
            assert cache.exceeded("default", "uid-one") is None
            assert cache.records(ONE) is None
            await until(cache, lambda: ONE in cache.prefixes())
            assert cache.records(ONE) is not None
            assert cache.records(TWO) is not None

    asyncio.run(main())
