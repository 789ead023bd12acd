"""Reconcile of a job on fake ports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest

from elasticjob_operator.core.actions import CreatePod
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.happenings import Happening
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.observed import Observed, Obstacle, Refusal, Sight
from elasticjob_operator.core.rendezvous_view import NOBODY_YET, RendezvousView
from elasticjob_operator.core.status import next_status
from elasticjob_operator.etcd_source import SETTLING_SECONDS
from elasticjob_operator.etcds import Refused
from elasticjob_operator.events import Subject
from elasticjob_operator.jobs import JobKey, JobMemory, Jobs
from elasticjob_operator.kube import Conflict, Json, Kind, KubeError, NotFound, Unreachable
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile import Parts, Reconciler
from elasticjob_operator.sources import RendezvousSource
from elasticjob_operator.task import Applied, Task
from elasticjob_operator.wakeups import Retry
from elasticjob_rendezvous.core.costs import History
from elasticjob_rendezvous.core.records import Cause, CauseKind, Round, RoundState
from elasticjob_rendezvous.etcd.errors import EtcdError
from tests.unit.operator.builders import NOW, job, manifest, observed
from tests.unit.operator.fake_source import FakeSource

KEY = JobKey("default", "job")
MADE = CreatePod(0, "job-0", 1)


@dataclass
class Api:
    """API server with one job; `error` fails its status updates."""

    error: KubeError | None = None
    status: Json = field(default_factory=dict)
    deleted: bool = False
    writes: list[Json] = field(default_factory=list)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        if self.deleted:
            raise NotFound("get", "no such job")
        raw = manifest(nodes=4)
        raw["metadata"] |= {"namespace": "default", "resourceVersion": "7"}
        return raw | {"status": self.status}

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        if self.error is not None:
            raise self.error
        self.writes.append(body)
        return {"metadata": {"resourceVersion": "8"}}


@dataclass
class Registry:
    """Registry with one source, or with a refusal."""

    source: RendezvousSource | Refused

    async def of(self, job: ElasticJob) -> RendezvousSource:
        if isinstance(self.source, Refused):
            raise self.source
        return self.source


@dataclass
class JobObserver:
    """Observer of a job without pods; the rendezvous is `view`. `seen` holds the sources."""

    view: RendezvousView = NOBODY_YET
    seen: list[RendezvousSource] = field(default_factory=list)

    async def look(self, job: ElasticJob, memory: JobMemory, source: RendezvousSource) -> Sight:
        self.seen.append(source)
        return Sight(observed())

    def look_again(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        before: Observed,
        applied: Applied,
    ) -> Observed:
        return replace(before, rendezvous=self.view, refusal=memory.refusal)


class OnePod:
    """Applier whose plans create one pod."""

    async def apply(self, task: Task, planned: Plan) -> Applied:
        return Applied(actions=[MADE], refusal=task.memory.refusal)


class NoBudget:
    """Budgets of jobs that have none."""

    async def drop_budget(self, job: ElasticJob, memory: JobMemory) -> None: ...


@dataclass
class Recorder:
    """Event recorder; `posted` holds the reasons."""

    posted: list[str] = field(default_factory=list)

    def tell(self, subject: Subject, found: Iterable[Happening]) -> None:
        self.posted += [one.reason for one in found]


class Rig:
    """Reconciler on fake ports."""

    def __init__(
        self,
        error: KubeError | None = None,
        view: RendezvousView = NOBODY_YET,
        source: RendezvousSource | Refused | None = None,
    ) -> None:
        self.api = Api(error)
        self.observer = JobObserver(view)
        self.recorder = Recorder()
        self.jobs = Jobs(lambda: 0.0, lambda: 0.0)
        self.closed: list[str] = []
        self.closing_error: EtcdError | None = None
        self.reconciler = Reconciler(
            Parts(
                kube=self.api,
                jobs=self.jobs,
                sources=Registry(source or FakeSource()),
                close_departed=self._close,
                observer=self.observer,
                applier=OnePod(),
                dependents=NoBudget(),
                events=self.recorder,
                metrics=Metrics(),
                clock=lambda: 0.0,
                now=lambda: NOW,
            )
        )

    async def _close(self, namespace: str, uid: str, now: datetime) -> None:
        self.closed.append(uid)
        if self.closing_error is not None:
            raise self.closing_error

    def look(self) -> float | None:
        return asyncio.run(self.reconciler.look(KEY))


@pytest.mark.parametrize(
    "error",
    [Conflict("patch", "it has changed"), Unreachable("patch", "no answer")],
    ids=["changed", "no answer"],
)
def test_applied_actions_are_reported_although_the_status_was_not_written(
    error: KubeError,
) -> None:
    rig = Rig(error)
    if isinstance(error, Conflict):
        assert rig.look() == 0.0, "again, at once"
    else:
        with pytest.raises(Retry):
            rig.look()
    assert rig.recorder.posted == ["PodsCreated"]


@pytest.mark.parametrize("written", [True, False], ids=["was written", "was not"])
def test_events_of_a_status_are_posted_once_although_its_answer_was_lost(written: bool) -> None:
    start = Cause(CauseKind.START)
    found = Records(
        "/elasticjob/default/job-uid/1/",
        round=Round(1, RoundState.FINAL, start, nodes=2),
        histories={1: History(1, start, 2)},
    )
    view = rendezvous_view(found)
    status = next_status(job(), observed(), view, NOW)
    document: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    rig = Rig(Unreachable("patch", "no answer"), view)
    for _ in range(2):  # lost, and lost again
        with pytest.raises(Retry):
            rig.look()
    assert set(rig.recorder.posted) == {"PodsCreated"}
    rig.api.error = None
    rig.api.status = document if written else {}
    for _ in range(2):
        rig.look()
        rig.api.status = document
    assert [rig.recorder.posted.count(reason) for reason in ("RoundFinal", "Running")] == [1, 1]


def test_job_with_a_refused_store_is_observed_without_it() -> None:
    rig = Rig(source=Refused(Obstacle.ENDPOINT, "not allowed"))
    rig.look()
    [source] = rig.observer.seen
    assert not source.usable
    memory = rig.jobs.find(KEY)
    assert memory is not None
    assert memory.refusal == Refusal(Obstacle.ENDPOINT, "not allowed", NOW)


def test_settling_source_keeps_the_status() -> None:
    rig = Rig(source=FakeSource(settling=True))
    rig.look()
    memory = rig.jobs.recall(KEY, "job-uid")
    memory.change.note(3.0)
    assert rig.look() == SETTLING_SECONDS
    assert rig.api.writes == []
    assert memory.change.at == 3.0, "its change is not shown yet"
    assert rig.recorder.posted == ["PodsCreated"] * 2


def test_written_status_includes_the_pending_change() -> None:
    rig = Rig()
    memory = rig.jobs.recall(KEY, "job-uid")
    memory.change.note(3.0)
    rig.look()
    assert memory.change.at is None
    assert memory.report.version == "8"


@pytest.mark.parametrize("fails", [True, False], ids=["etcd is down", "closed"])
def test_rendezvous_of_a_deleted_job_is_closed(fails: bool) -> None:
    rig = Rig()
    rig.look()
    rig.api.deleted = True
    rig.closing_error = EtcdError("txn", "etcd:2379", "no answer") if fails else None
    assert rig.look() is None
    assert rig.closed == ["job-uid"]
    assert rig.jobs.find(KEY) is None
    assert rig.jobs.departed == {("default", "job-uid")}
