"""Rendezvous in an etcd that was read: what its records decide, and what memory keeps."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from elasticjob_operator.domain.manifests.names import INCARNATION_LABEL
from elasticjob_operator.domain.observed.etcd_records import Records, job_of, outcome_record
from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    Observation,
    Pod,
    SeenTrouble,
    StopReason,
)
from elasticjob_operator.domain.plan.actions import RemoveMembers
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.kubernetes.client import Json, Kind, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, RendezvousMemory
from elasticjob_operator.reconcile.live_pods import PodObjects
from elasticjob_operator.reconcile.resync import close_deleted_job
from elasticjob_operator.rendezvous import informer_cache
from elasticjob_operator.rendezvous.etcd_source import MAX_LOOKUPS, Etcd, EtcdSource
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.kv import Compare, Put, Target, Txn, TxnResult
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.store_trouble import ETCD, StoreState, StoreTrouble
from elasticjob_rendezvous.store_monitor import StoreMonitor
from tests.unit.operator.builders import NOW, failure, job, member, pod

OLD, NEW = RendezvousParams(1, 2), RendezvousParams(2, 4)
STARTED = Round(1, RoundState.JOINABLE, Cause(CauseKind.START))


def closed(reason: StopReason) -> Round:
    """Return the round, closed by the operator for this reason."""
    outcome = outcome_record(OutcomeKind.STOPPED, reason)
    return replace(STARTED, state=RoundState.CLOSED, outcome=outcome)


def prefix(incarnation: int) -> str:
    return job_prefix("default", "job-uid", incarnation)


class FakeClient(Client):
    """Client that keeps each transaction in `txns`; its revision is their number."""

    def __init__(self) -> None:
        super().__init__(["http://127.0.0.1:1"])
        self.txns: list[Txn] = []

    async def txn(self, op: Txn) -> TxnResult:
        self.txns.append(op)
        return TxnResult(True, len(self.txns), 0)


class FakeCache(InformerCache):
    """Informer cache whose content a test sets.

    `readable` is False while etcd is unreadable. `awaited` holds the revisions that writes
    waited for, all in vain while it is unreadable.
    """

    def __init__(self, client: Client, *shown: Records) -> None:
        super().__init__(client)
        self.readable = True
        self.shown = {one.prefix: one for one in shown}
        self.awaited: list[int] = []

    @property
    def known(self) -> bool:
        return self.readable

    def newest(self, namespace: str, uid: str) -> int | None:
        found = (job_of(one) for one in self.shown)
        return max((one[2] for one in found if one and one[:2] == (namespace, uid)), default=None)

    def records(self, prefix: str) -> Records | None:
        return self.shown.get(prefix, Records(prefix)) if self.readable else None

    async def reached(self, revision: int, timeout_seconds: float) -> bool:
        self.awaited.append(revision)
        return self.readable


class NoObjects:
    """Kubernetes client of an empty cluster."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        raise NotFound("get", f"{name} not found")

    def now(self) -> datetime:
        return NOW


@dataclass
class FakePods:
    """Pods of a job, by index, of which a LIST shows some; `asked` holds the names looked up."""

    listed: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    asked: list[Set[str]] = field(default_factory=list)

    async def read(self, job: ElasticJob, memory: JobMemory) -> PodObjects:
        return PodObjects(self, job, memory, [_raw(index) for index in self.listed])

    async def unlisted(
        self, job: ElasticJob, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        self.asked.append(names)
        return [_raw(index) for index in self.hidden if f"job-{index}" in names]

    async def convert(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        names = (raw["metadata"]["name"] for raw in own)
        return tuple(pod(int(name.rpartition("-")[2])).get() for name in names)


def _raw(index: int) -> Json:
    """Return the Pod object of the first pod with this index, in incarnation 1."""
    known = pod(index).get()
    labels = {INCARNATION_LABEL: "1"}
    return {"metadata": {"uid": known.uid, "name": known.name, "labels": labels}, "spec": {}}


class Rig(NamedTuple):
    """Source of a job on fakes, with the memory of the job."""

    client: FakeClient
    cache: FakeCache
    source: EtcdSource
    memory: JobMemory

    async def observe(self, pods: FakePods | None = None) -> Observation:
        return await self.source.observe(job(), self.memory, pods or FakePods())


def rig(*shown: Records, remembered: RendezvousMemory | None = None) -> Rig:
    """Return a source in an etcd whose informer cache shows these records."""
    client = FakeClient()
    cache = FakeCache(client, *shown)
    source = EtcdSource(Etcd(client, cache), NoObjects(), "default", "job-uid")
    memory = JobMemory(JobKey("default", "job"), "job-uid")
    memory.rendezvous = remembered or RendezvousMemory()
    return Rig(client, cache, source, memory)


def test_written_parameters_are_remembered_until_the_cache_shows_them() -> None:
    async def scenario() -> None:
        made = rig(Records(prefix(1), OLD))
        before = (await made.observe()).observed
        made.cache.readable = False
        await made.source.write_params(made.memory, 2, NEW, 0)
        key = Keys(prefix(2)).bounds
        [txn] = made.client.txns
        assert txn.compares == (Compare(key, Target.MOD, 0),)
        assert txn.success == (Put(key, encode(NEW)),)
        assert made.cache.awaited == [1]
        unread = made.source.observe_again(job(), made.memory, before)
        assert (unread.incarnation, unread.bounds) == (2, NEW)
        unread = (await made.observe()).observed
        assert (unread.incarnation, unread.bounds) == (2, NEW)
        assert unread.rendezvous == UNREADABLE
        made.cache.shown[prefix(2)] = Records(prefix(2), OLD)
        made.cache.readable = True
        shown = (await made.observe()).observed
        assert (shown.incarnation, shown.bounds) == (2, OLD), "the cache decides again"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("recorded", "goes_on"),
    [
        (None, True),
        (STARTED, True),
        (closed(StopReason.DEADLINE_EXCEEDED), True),
        (closed(StopReason.SUSPENDED), False),
    ],
    ids=["no round yet", "joinable", "ended", "suspended"],
)
def test_incarnation_stays_known_when_etcd_is_lost_unless_it_was_suspended(
    recorded: Round | None, goes_on: bool
) -> None:
    async def scenario() -> None:
        remembered = RendezvousMemory(1, goes_on=not goes_on)
        made = rig(Records(prefix(1), OLD, recorded), remembered=remembered)
        assert (await made.observe()).incarnation_known, "etcd is readable"
        assert made.memory.rendezvous.goes_on is goes_on
        made.cache.readable = False
        assert (await made.observe()).incarnation_known is goes_on
        assert made.memory.rendezvous.goes_on is goes_on, "nothing was read since"

    asyncio.run(scenario())


def test_observation_has_the_time_for_which_etcd_was_unreadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        made = rig(Records(prefix(1), OLD))
        clock = SimpleNamespace(monotonic=lambda: made.cache._lost_at + 3.0)
        monkeypatch.setattr(informer_cache, "time", clock)
        before = (await made.observe()).observed
        assert before.unreadable_seconds == math.inf
        made.cache.readable = False
        assert (await made.observe()).observed.unreadable_seconds == 3.0
        again = made.source.observe_again(job(), made.memory, before)
        assert again.unreadable_seconds == 3.0

    asyncio.run(scenario())


def test_etcd_that_returns_while_the_pods_are_read_was_unreadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The records are missing, so a stop must not take the job for one without a round."""

    async def scenario() -> None:
        made = rig(Records(prefix(1), OLD), remembered=RendezvousMemory(1, bounds=OLD))
        clock = SimpleNamespace(monotonic=lambda: made.cache._lost_at + 3.0)
        monkeypatch.setattr(informer_cache, "time", clock)
        made.cache.readable = False
        pods, read = FakePods((0,)), FakePods.read

        async def returning(*arguments: Any) -> PodObjects:
            made.cache.readable = True
            return await read(*arguments)

        monkeypatch.setattr(FakePods, "read", returning)
        seen = (await made.observe(pods)).observed
        assert not seen.rendezvous.readable
        assert seen.unreadable_seconds == 3.0

    asyncio.run(scenario())


@pytest.mark.parametrize("recorded", [NEW, None], ids=["other bounds", "no bounds"])
def test_readable_bounds_are_those_of_the_records_not_those_remembered(
    recorded: RendezvousParams | None,
) -> None:
    async def scenario() -> None:
        remembered = RendezvousMemory(1, bounds=OLD)
        made = rig(Records(prefix(1), recorded), remembered=remembered)
        seen = (await made.observe(FakePods((0,)))).observed
        assert seen.bounds == recorded
        assert made.source.has_lost(seen) is (recorded is None)
        assert made.source.observe_again(job(), made.memory, seen).bounds == recorded
        made.cache.readable = False
        assert (await made.observe(FakePods((0,)))).observed.bounds == OLD

    asyncio.run(scenario())


def test_pod_of_a_member_missing_from_the_list_is_looked_up_by_name() -> None:
    members = (
        member("job-0", "running"),
        member("job-1", "running"),
        member("job-2"),
        member("job-3", "done"),
        member("other-4", "running"),
    )
    made, pods = rig(Records(prefix(1), OLD, members=members)), FakePods((0,), hidden=(1, 3))
    seen = asyncio.run(made.observe(pods)).observed
    assert pods.asked == [{"job-1", "job-2"}], "not done, and named as a pod of the job"
    assert [one.name for one in seen.pods] == ["job-0", "job-1"]
    assert seen.rendezvous.members == members


@dataclass
class StillbornPods(FakePods):
    """Pods that failed without ever being Ready."""

    async def convert(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        names = (raw["metadata"]["name"] for raw in own)
        return tuple(pod(int(name.rpartition("-")[2])).stillborn().get() for name in names)


SEATS = Roster(1, 1, "", 0, (RankAssignment("uid-0-0", "job-0", "", 1, "", 0, 0, 0, 1),))


@pytest.mark.parametrize(
    ("found", "launch_failed"),
    [
        (Records(prefix(1), members=(member("job-0"),)), False),
        (Records(prefix(1), rosters={1: SEATS}), False),
        (Records(prefix(1), failures=(replace(failure(1, "job-0"), member="uid-0-0"),)), False),
        (Records(prefix(1), members=(member("job-1"),)), True),
        (Records(prefix(1)), True),
    ],
    ids=["member", "roster", "failure", "another member", "no records"],
)
def test_failed_pod_that_was_a_member_is_no_launch_failure(
    found: Records, launch_failed: bool
) -> None:
    async def scenario() -> None:
        made, pods = rig(found), StillbornPods((0,))
        seen = (await made.observe(pods)).observed
        assert [one.launch_failed for one in seen.pods] == [launch_failed]
        made.cache.shown[prefix(1)] = Records(prefix(1))
        again = (await made.observe(pods)).observed
        assert [one.launch_failed for one in again.pods] == [launch_failed], "its records may go"
        await made.observe(FakePods())
        assert made.memory.rendezvous.joined == frozenset()

    asyncio.run(scenario())


def test_no_pod_is_looked_up_while_etcd_is_unreadable() -> None:
    made, pods = rig(Records(prefix(1), members=(member("job-1"),))), FakePods((0,), hidden=(1,))
    made.cache.readable = False
    seen = asyncio.run(made.observe(pods)).observed
    assert not pods.asked
    assert [one.name for one in seen.pods] == ["job-0"]


def test_one_observation_looks_up_64_pods_and_concludes_nothing_about_the_others() -> None:
    """A job's records name 200 members without pods, one of which is another member's pod."""
    made = job(maxNodes=200)
    members = (member("job-0"), *(member(f"job-{index}", id=f"x{index}") for index in range(200)))

    async def scenario() -> None:
        reading, pods = rig(Records(prefix(1), OLD, STARTED, members=members)), FakePods((0,))
        observation = await reading.source.observe(made, reading.memory, pods)
        assert pods.asked == [{f"job-{index}" for index in range(1, MAX_LOOKUPS + 1)}]
        seen = observation.observed
        assert seen.unchecked == {f"x{index}" for index in range(MAX_LOOKUPS + 1, 200)}
        actions = plan(made, seen, NOW).actions
        assert reading.source.observe_again(made, reading.memory, seen).unchecked == seen.unchecked
        (removal,) = (one for one in actions if isinstance(one, RemoveMembers))
        assert set(removal.members) == {f"x{index}" for index in range(MAX_LOOKUPS + 1)}
        left = tuple(one for one in members if one.id not in removal.members)
        reading.cache.shown[prefix(1)] = Records(prefix(1), OLD, STARTED, members=left)
        await reading.source.observe(made, reading.memory, pods)
        assert pods.asked[1] == {f"job-{index}" for index in range(65, 129)}

    asyncio.run(scenario())


def test_members_beyond_max_nodes_are_ignored_and_cause_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Members with a pod are kept, then the oldest of the others."""
    strangers = tuple(member(f"job-{index}", id=f"stranger-{index}") for index in range(100, 2100))
    own = tuple(member(f"job-{index}") for index in range(6))

    async def scenario() -> None:
        made = rig(Records(prefix(1), OLD, STARTED, members=(*strangers, *own)))
        pods = FakePods(listed=tuple(range(6)))
        for _ in range(2):
            seen = (await made.observe(pods)).observed
            assert [one.id for one in seen.rendezvous.members] == [
                *(one.id for one in strangers[:4]),
                *(one.id for one in own),
            ]
            again = made.source.observe_again(job(), made.memory, seen)
            assert again.rendezvous == seen.rendezvous
            assert pods.asked[-1] == {"job-100", "job-101", "job-102", "job-103"}

    asyncio.run(scenario())
    told = [one.getMessage() for one in caplog.records]
    assert told == ["ignoring the records of 1996 members beyond maxNodes (4), which have no pod"]


def test_deleted_job_is_woken_once_the_etcd_that_is_to_close_it_is_readable() -> None:
    async def scenario() -> None:
        made = rig(Records(prefix(1), OLD, STARTED))
        etcd, agents = made.source.etcd, SimpleNamespace(forget=lambda uid: None)
        etcds: Any = SimpleNamespace(agents=agents, all=lambda: [etcd])
        made.cache.readable = False
        assert not await close_deleted_job(etcds, "default", "job-uid", NOW)
        assert etcd.waiting == {("default", "job-uid")}

    asyncio.run(scenario())


def test_age_of_a_trouble_is_that_of_the_operators_own_probes() -> None:
    """The clock of the API server, by which plans count, may be another."""
    etcd = rig().source.etcd
    trouble = StoreTrouble(ETCD, StoreState.REFUSING, "etcd:2379", "no leader", 1)
    etcd.monitor = cast(StoreMonitor, SimpleNamespace(trouble=trouble, failing_seconds=7.0))
    assert etcd.trouble_of("job-uid") == SeenTrouble(trouble, (), 7.0)
