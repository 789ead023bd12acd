"""Operator's informer cache of the rendezvous, on a real etcd with outages and losses of data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elasticjob_operator.mirror import Mirror, close, remove_members, write_bounds
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.keys import ROOT, Keys, job_prefix
from elasticjob_rendezvous.core.kv import Delete, Put, Txn
from elasticjob_rendezvous.core.records import (
    Cause,
    CauseKind,
    Member,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.etcd.client import Client
from tests.integration.etcd_server import EtcdServer

ONE = job_prefix("default", "uid-one", 1)
TWO = job_prefix("default", "uid-two", 1)
BOUNDS = Bounds(min_nodes=1, max_nodes=4)
ROUND = Round(3, RoundState.FINAL, Cause(CauseKind.JOIN, ("b",)), nodes=2, world_size=2)
STOPPED = Outcome(OutcomeKind.STOPPED, "Suspended")


@asynccontextmanager
async def mirrored(server: EtcdServer) -> AsyncIterator[tuple[Client, Mirror]]:
    """Yield a client and a running mirror."""
    async with Client([server.url], request_timeout_seconds=2.0) as client:
        mirror = Mirror(client)
        running = asyncio.create_task(mirror.run())
        try:
            yield client, mirror
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until(mirror: Mirror, condition: Callable[[], Any]) -> list[str]:
    """Follow the changes until the condition holds; return the prefixes reported meanwhile."""
    told: list[str] = []
    async with asyncio.timeout(15):
        changes = mirror.changes()
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
        async with mirrored(server) as (client, mirror):
            assert mirror.records(ONE) is None  # nothing is known before the first read
            await put(client, Keys(ONE).round, ROUND)
            async with asyncio.timeout(15):
                assert await anext(mirror.changes()) == ONE
            found = mirror.records(ONE)
            assert found is not None
            assert found.round == ROUND

            told = asyncio.create_task(until(mirror, lambda: TWO in mirror.prefixes()))
            await put(client, Keys(TWO).session("b", "s"), Member("b", "s", "b", "127.0.0.1", 1))
            assert set(await told) == {TWO}
            two = mirror.records(TWO)
            assert two is not None
            assert [member.id for member in two.members] == ["b"]

            await client.txn(Txn((), (Delete(ONE, prefix=True),)))
            await until(mirror, lambda: ONE not in mirror.prefixes())
            gone = mirror.records(ONE)
            assert gone is not None
            assert gone.round is None

    asyncio.run(main())


def test_write_can_be_awaited(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            for size in range(1, 20):
                bounds = Bounds(min_nodes=1, max_nodes=size)
                revision = await write_bounds(client, ONE, bounds)
                assert await mirror.reached(revision, 5.0)
                found = mirror.records(ONE)
                assert found is not None
                assert found.bounds == bounds
            assert not await mirror.reached(revision + 1, 0.05)

    asyncio.run(main())


def test_outage_empties_cache_and_recovery_fills_it(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            await put(client, Keys(ONE).round, ROUND)
            await until(mirror, lambda: ONE in mirror.prefixes())
            cluster = mirror.cluster_id

            away = asyncio.create_task(until(mirror, lambda: mirror.records(ONE) is None))
            await asyncio.to_thread(server.kill)
            assert ONE in await away
            await asyncio.to_thread(server.start)
            await until(mirror, lambda: mirror.known)
            found = mirror.records(ONE)
            assert found is not None
            assert (found.round, mirror.cluster_id) == (ROUND, cluster)

            after = await put(client, Keys(TWO).round, ROUND)
            assert await mirror.reached(after, 5.0)  # and it goes on watching

    asyncio.run(main())


def test_data_loss_empties_cache_and_is_reported(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            for _ in range(5):
                before = await put(client, Keys(ONE).round, ROUND)
            await until(mirror, lambda: mirror.revision >= before)

            await asyncio.to_thread(server.kill)
            await until(mirror, lambda: not mirror.known)
            await asyncio.to_thread(server.wipe)
            await asyncio.to_thread(server.start)
            await until(mirror, lambda: mirror.known)

            assert mirror.prefixes() == ()
            assert mirror.revision < before
            # At a revision that the lost store had passed already: a watch from there is silent.
            after = await put(client, Keys(TWO).round, ROUND)
            assert after < before
            await until(mirror, lambda: TWO in mirror.prefixes())

    asyncio.run(main())


def test_compaction_does_not_disturb_cache(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            await put(client, Keys(ONE).round, ROUND)
            await until(mirror, lambda: ONE in mirror.prefixes())
            for number in range(50):
                await put(client, Keys(TWO).bounds, Bounds(1, 1 + number))
            last = await put(client, Keys(ONE).bounds, BOUNDS)
            await asyncio.to_thread(server.ctl, "compact", str(last))
            await client.txn(Txn((), (Delete(Keys(TWO).bounds),)))
            await until(mirror, lambda: TWO not in mirror.prefixes())
            found = mirror.records(ONE)
            assert found is not None
            assert (found.round, found.bounds) == (ROUND, BOUNDS)

    asyncio.run(main())


def test_rendezvous_is_closed_from_outside(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            await put(client, Keys(ONE).round, ROUND)
            assert await close(client, ONE, STOPPED, utc_ms=5)
            assert not await close(client, ONE, Outcome(OutcomeKind.FAILED), utc_ms=6)
            assert await close(client, TWO, STOPPED, utc_ms=5)  # before any member came
            await until(mirror, lambda: TWO in mirror.prefixes())
            for prefix, number in ((ONE, 3), (TWO, 1)):
                found = mirror.records(prefix)
                assert found is not None
                assert found.round is not None
                assert found.round.state is RoundState.CLOSED
                assert (found.round.number, found.round.outcome) == (number, STOPPED)

    asyncio.run(main())


def test_unknown_keys_below_root_are_ignored(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            await client.put(Put(ROOT + "stray", b"?"))
            await client.put(Put(Keys(ONE).round, b"not json"))
            await until(mirror, lambda: ONE in mirror.prefixes())
            assert mirror.prefixes() == (ONE,)
            found = mirror.records(ONE)
            assert found is not None
            assert found.round is None
            assert "another program may be writing" in found.malformed[0]

    asyncio.run(main())


def test_members_of_deleted_pods_are_removed(server: EtcdServer) -> None:
    async def main() -> None:
        async with mirrored(server) as (client, mirror):
            keys = Keys(ONE)
            for index in range(150):
                name = f"m{index}"
                await put(client, keys.session(name, "s"), Member(name, "s", name, "127.0.0.1", 1))
            await put(client, keys.session("m1", "t"), Member("m1", "t", "m1", "127.0.0.1", 1))
            await put(client, Keys(TWO).session("m1", "s"), Member("m1", "s", "b", "127.0.0.1", 1))
            await remove_members(client, ONE, [f"m{index}" for index in range(1, 150)])
            await until(mirror, lambda: len(members(mirror, ONE)) == 1)
            assert (members(mirror, ONE), members(mirror, TWO)) == (["m0"], ["m1"])
            await remove_members(client, ONE, ["m1"])  # a repetition has no effect
            assert members(mirror, ONE) == ["m0"]

    asyncio.run(main())


def members(mirror: Mirror, prefix: str) -> list[str]:
    found = mirror.records(prefix)
    assert found is not None
    return [member.id for member in found.members]
