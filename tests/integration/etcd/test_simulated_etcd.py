"""Comparison of the simulated etcd with a real one: the same requests, the same answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Compacted, InvalidRequest, LeaseLost
from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Is,
    KeyValue,
    Op,
    Order,
    Put,
    Range,
    Target,
    Txn,
    TxnResult,
    WatchBatch,
    WatchEvent,
)
from tests.integration.etcd.watches import drained, events_of, opened
from tests.integration.etcd_server import NEWEST, EtcdServer
from tests.sim.etcd import simulated_etcd
from tests.sim.etcd.simulated_etcd import SimEtcd

NOBODY = -1
KEYS = ("a", "ab", "c/1", "c/2")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """Revocation of a lease, by its index among those granted so far."""

    index: int


Step = Txn | RevokeLease
"""Step of an example. In a `Txn` a lease is 1 + its index, and the revision of a comparison is
relative to the key's revision at that step (a missing key: 0).
"""

_keys = st.sampled_from(KEYS)
_puts = st.builds(Put, _keys, st.binary(max_size=2), st.sampled_from((0, 0, 1, 1, 2, 2, 1, 2, 3)))
_deletes = st.builds(Delete, st.sampled_from((*KEYS, "", "c/")), st.booleans())
_ranges = st.builds(
    Range,
    st.sampled_from((*KEYS, "", "c/")),
    st.booleans(),
    st.sampled_from(Order),
    st.sampled_from((0, 0, 1, 2)),
)
_wide = st.builds(
    Range, st.sampled_from(("", "c/")), st.just(True), st.sampled_from(Order), st.just(0)
)
_branches = st.lists(
    st.one_of(_puts, _puts, _deletes, _ranges, _wide),
    max_size=3,
    unique_by=lambda op: (type(op) is Range, op.key),
).map(tuple)
_careless = st.lists(st.one_of(_puts, _deletes), max_size=3).map(tuple)
_ops = st.one_of(_branches, _branches, _branches, _careless)
_compares = st.builds(
    Compare,
    _keys,
    st.sampled_from(Target),
    st.sampled_from((-1, 0, 0, 1)),
    st.sampled_from(Is),
)
_txns = st.builds(Txn, st.lists(_compares, max_size=2).map(tuple), _ops, _ops)
_steps = st.one_of(
    _txns,
    _txns,
    _txns,
    st.builds(RevokeLease, st.sampled_from((0, 1, *[NOBODY] * 10))),
)


@dataclass(slots=True)
class Pair:
    """Real and simulated store executing one example."""

    client: Client
    prefix: str
    begin: int
    sim: SimEtcd = field(default_factory=SimEtcd)
    leases: list[tuple[int, int]] = field(default_factory=list)

    def key(self, key: str) -> str:
        return self.prefix + key

    def lease(self, number: int, side: int) -> int:
        """Return the lease id of a put; a lease never granted exists on neither side."""
        if number == 0:
            return 0
        return self.leases[number - 1][side] if number <= len(self.leases) else 12345

    def compare(self, compare: Compare, side: int) -> Compare:
        """Translate a comparison for one side."""
        found = self.sim.get(self.key(compare.key))
        revision = compare.revision
        if found is not None:
            by_mod = compare.target is Target.MOD
            revision += found.mod_revision if by_mod else found.create_revision
            revision += self.begin - 1 if side == 0 else 0
        return replace(compare, key=self.key(compare.key), revision=max(0, revision))

    def op(self, op: Op, side: int) -> Op:
        moved = replace(op, key=self.key(op.key))
        if isinstance(moved, Put):
            return replace(moved, lease=self.lease(moved.lease, side))
        return moved

    def txn(self, txn: Txn, side: int) -> Txn:
        return Txn(
            tuple(self.compare(compare, side) for compare in txn.compares),
            tuple(self.op(op, side) for op in txn.success),
            tuple(self.op(op, side) for op in txn.failure),
        )

    # -- compared values ------------------------------------------------------------

    def kv(self, kv: KeyValue, side: int) -> KeyValue:
        offset = self.begin - 1 if side == 0 else 0
        lease = next((i for i, pair in enumerate(self.leases, 1) if pair[side] == kv.lease), 0)
        return KeyValue(
            kv.key, kv.value, kv.create_revision - offset, kv.mod_revision - offset, lease
        )

    def event(self, event: WatchEvent, side: int) -> WatchEvent:
        if isinstance(event, KeyValue):
            return self.kv(event, side)
        offset = self.begin - 1 if side == 0 else 0
        return replace(event, mod_revision=event.mod_revision - offset)

    def result(self, result: TxnResult, side: int) -> object:
        offset = self.begin - 1 if side == 0 else 0
        ranges = [(target, [self.kv(kv, side) for kv in found]) for target, found in result.ranges]
        return result.succeeded, result.revision - offset, ranges

    # -- steps ----------------------------------------------------------------------

    async def step(self, step: Step) -> None:
        match step:
            case RevokeLease(index) if index != NOBODY:
                await self.client.revoke(self.leases[index][0])
                self.sim.revoke(self.leases[index][1])
            case Txn():
                real, sim = self.txn(step, 0), self.txn(step, 1)
                answer = await self.real_answer(real)
                assert answer == self.sim_answer(sim), step

    async def grant(self) -> None:
        real = await self.client.grant(600)
        sim = self.sim.grant(600, 0.0)
        assert real.ttl_seconds == sim.ttl_seconds
        self.leases.append((real.id, sim.id))

    async def real_answer(self, txn: Txn) -> object:
        try:
            return self.result(await self.client.txn(txn), 0)
        except LeaseLost:
            return "no such lease"
        except InvalidRequest:
            return "refused"

    def sim_answer(self, txn: Txn) -> object:
        try:
            return self.result(self.sim.txn(txn), 1)
        except simulated_etcd.LeaseMissing:
            return "no such lease"
        except simulated_etcd.Refused:
            return "refused"

    async def compare_history(self) -> None:
        """Compare all writes, as reported by a watch from the example's beginning."""
        batches: list[WatchBatch] = []
        self.sim.watch(Range(self.prefix, prefix=True), 2, batches.append)
        expected = [self.event(event, 1) for batch in batches for event in batch.events]
        watch = self.client.watch([Range(self.prefix, prefix=True)], self.begin + 1)
        async with aclosing(watch):
            await opened(watch)
            found = await events_of(watch, len(expected)) if expected else []
        assert [self.event(event, 0) for event in found] == expected


@pytest.fixture(scope="module")
def private_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Yield a server of its own: the expiry of another test's lease would add a revision."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), NEWEST)
    try:
        yield server.start()
    finally:
        server.close()


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(_steps, min_size=15, max_size=25))
def test_same_requests_get_same_answers(
    private_etcd: EtcdServer, prefix: str, steps: list[Step]
) -> None:
    async def main() -> None:
        async with Client([private_etcd.url]) as client:
            mine = f"{prefix}{next(_numbers)}/"
            begin = (await client.range(Range(mine))).revision
            pair = Pair(client, mine, begin)
            await pair.grant()
            await pair.grant()
            for step in steps:
                await pair.step(step)
            await pair.compare_history()

    asyncio.run(main())


@pytest.mark.parametrize("ttl_seconds", [2, 5])
def test_minimum_lease_ttl_is_same(private_etcd: EtcdServer, ttl_seconds: int) -> None:
    async def main() -> None:
        async with Client([private_etcd.url]) as client:
            real = await client.grant(ttl_seconds)
            await client.revoke(real.id)
            assert real.ttl_seconds == SimEtcd().grant(ttl_seconds, 0.0).ttl_seconds

    asyncio.run(main())


def test_watch_of_compacted_revision_is_refused_by_both(
    private_etcd: EtcdServer, prefix: str
) -> None:
    target = Range(f"{prefix}k")
    sim = SimEtcd()

    async def main() -> None:
        async with Client([private_etcd.url]) as client:
            real = [await client.put(Put(target.key, bytes([n]))) for n in range(3)]
            simulated = [
                sim.txn(Txn((), (Put(target.key, bytes([n])),))).revision for n in range(3)
            ]
            private_etcd.ctl("compaction", str(real[1]))
            sim.compact(simulated[1])
            with pytest.raises(Compacted):
                await drained(client.watch([target], real[0]))
            with pytest.raises(simulated_etcd.Compacted):
                sim.watch(target, simulated[0], lambda _: None)
            watch = client.watch([target], real[1])
            await opened(watch)
            seen = await events_of(watch, 2)
            batches: list[WatchBatch] = []
            sim.watch(target, simulated[1], batches.append)
            assert [event.value for event in seen if isinstance(event, KeyValue)] == [
                event.value
                for batch in batches
                for event in batch.events
                if isinstance(event, KeyValue)
            ]

    asyncio.run(main())
