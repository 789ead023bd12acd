"""Reconcile of a job on fake ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pytest

from elasticjob_operator.domain.observed.etcd_records import (
    Records,
    outcome_record,
    rendezvous_view,
)
from elasticjob_operator.domain.observed.state import (
    NO_MEMBERS,
    UNREADABLE,
    Observation,
    Observed,
    Obstacle,
    Refusal,
    RendezvousView,
    SeenTrouble,
    StopReason,
)
from elasticjob_operator.domain.plan.actions import CreatePod
from elasticjob_operator.domain.plan.closing_checkpoint import COORDINATOR_SECONDS, WAIT_SECONDS
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.domain.status.events import Event
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.kubernetes.client import (
    Conflict,
    Forbidden,
    Json,
    Kind,
    KubeError,
    NotFound,
    QuotaConflict,
    QuotaExceeded,
    Unreachable,
)
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob, Problem, parse_manifest
from elasticjob_operator.reconcile.cluster import Applied, ReconcileContext
from elasticjob_operator.reconcile.fault_guard import MAX_EXCESSES, MAX_FAULTS, RECONCILE_SECONDS
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, Jobs, PodMemory
from elasticjob_operator.reconcile.owned_objects import NotServed
from elasticjob_operator.reconcile.processor_time import ProcessorTime, TooLong
from elasticjob_operator.reconcile.reconciler import (
    QUOTA_CONFLICT_SECONDS,
    UNWATCHED_SECONDS,
    Dependencies,
    Reconciler,
)
from elasticjob_operator.reconcile.status_writer import RESEND_SECONDS
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.etcd_registry import EtcdRefused
from elasticjob_operator.rendezvous.etcd_source import SETTLING_SECONDS
from elasticjob_operator.rendezvous.sources import RendezvousSource
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import STOP_MARGIN_SECONDS
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.store_trouble import ETCD, StoreState, StoreTrouble
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    job,
    manifest,
    observed,
    running,
)
from tests.unit.operator.rendezvous.fake_source import FakeSource

KEY = JobKey("default", "job")
MADE = CreatePod(0, "job-0", 1)


@dataclass
class Api:
    """API server with one job; `error` fails its status updates, `lost` is their lost answer."""

    error: KubeError | None = None
    lost: KubeError | None = None
    status: Json = field(default_factory=dict)
    deleted: bool = False
    generation: int = 3
    spec: Json = field(default_factory=dict)
    writes: list[Json] = field(default_factory=list)
    removed: list[tuple[str, str]] = field(default_factory=list)
    unknown: frozenset[str] = frozenset()  # fields of the status that its CRD lacks

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        if self.deleted:
            raise NotFound("get", "no such job")
        raw = manifest(nodes=4)
        raw["metadata"] |= {"namespace": "default", "resourceVersion": "7"}
        raw["metadata"]["generation"] = self.generation
        raw["spec"] |= self.spec
        return raw | {"status": self.status} if self.status else raw

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        if self.error is not None:
            raise self.error
        self.writes.append(body)
        if not self.unknown:
            return {"metadata": {"resourceVersion": "8"}}
        merged = merged_with(self.status, body["status"])
        self.status = {key: value for key, value in merged.items() if key not in self.unknown}
        if self.lost is not None:
            raise self.lost
        return {"metadata": {"resourceVersion": "8"}, "status": self.status}

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str) -> bool:
        if self.error is not None:
            raise self.error
        self.removed.append((name, uid))
        return True


def merged_with(document: Json, patch: Json) -> Json:
    """Apply a merge patch (RFC 7386)."""
    found = {key: value for key, value in document.items() if key not in patch}
    for key, value in patch.items():
        if isinstance(value, dict):
            old = document.get(key)
            found[key] = merged_with(old if isinstance(old, dict) else {}, value)
        elif value is not None:
            found[key] = value
    return found


@dataclass
class Registry:
    """Registry with one source, or with a refusal."""

    source: RendezvousSource | EtcdRefused

    async def of(self, job: ElasticJob) -> RendezvousSource:
        if isinstance(self.source, EtcdRefused):
            raise self.source
        return self.source


@dataclass
class JobObserver:
    """Observer of a job without pods; the rendezvous is `view`. `seen` holds the sources."""

    view: RendezvousView = NO_MEMBERS
    before: Observed = field(default_factory=observed)
    seen: list[RendezvousSource] = field(default_factory=list)
    fault: Callable[[], None] = lambda: None
    foreign: frozenset[int] = frozenset()

    async def observe(
        self, job: ElasticJob, memory: JobMemory, source: RendezvousSource
    ) -> Observation:
        self.seen.append(source)
        self.fault()
        return Observation(self.before)

    def observe_again(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        before: Observed,
        applied: Applied,
    ) -> Observed:
        memory.pods = PodMemory(foreign=self.foreign)
        return replace(before, rendezvous=self.view, refusal=memory.refusal)


@dataclass
class OnePod:
    """Applier whose plans create one pod, or meet this refusal, in so many `seconds`."""

    refusal: Refusal | None = None
    refused: bool = False
    unfinished: bool = False
    error: KubeError | None = None
    kept: dict[str, str] = field(default_factory=dict)
    deleted: frozenset[str] = frozenset()
    seconds: float = 0.0
    spent: float = 0.0

    async def apply(self, task: ReconcileContext, planned: Plan) -> Applied:
        self.spent += self.seconds
        refusal = self.refusal or task.memory.refusal
        return Applied(
            actions=[MADE],
            refusal=refusal,
            refused=self.refused,
            unfinished=self.unfinished,
            error=self.error,
            kept=self.kept,
            deleted=set(self.deleted),
        )


class Budgets:
    """Budgets of jobs that have none; `error` is that of their deletion."""

    error: KubeError | None = None

    async def drop_budget(self, job: ElasticJob, memory: JobMemory) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class Recorder:
    """Event recorder; `posted` holds the reasons."""

    posted: list[str] = field(default_factory=list)

    def record(self, subject: Subject, found: Iterable[Event]) -> None:
        self.posted += [one.reason for one in found]


class Rig:
    """Reconciler on fake ports."""

    def __init__(
        self,
        error: KubeError | None = None,
        view: RendezvousView = NO_MEMBERS,
        source: RendezvousSource | EtcdRefused | None = None,
        reconcile_seconds: float = RECONCILE_SECONDS,
    ) -> None:
        self.api = Api(error)
        self.observer = JobObserver(view)
        self.applier = OnePod()
        self.recorder = Recorder()
        self.budgets = Budgets()
        self.jobs = Jobs(lambda: 0.0, lambda: 0.0)
        self.time = 0.0
        self.closed: list[str] = []
        self.closes = True
        self.closing_error: EtcdError | None = None
        self.reconciler = Reconciler(
            Dependencies(
                kube=self.api,
                jobs=self.jobs,
                sources=Registry(source or FakeSource()),
                close_deleted_job=self._close,
                observer=self.observer,
                applier=self.applier,
                owned_objects=self.budgets,
                events=self.recorder,
                metrics=Metrics(),
                processor_time=ProcessorTime(step_seconds=0.5, total_seconds=2.0),
                clock=lambda: self.time,
                now=lambda: ago(-self.applier.spent),
                reconcile_seconds=reconcile_seconds,
            )
        )

    async def _close(self, namespace: str, uid: str, now: datetime) -> bool:
        self.closed.append(uid)
        if self.closing_error is not None:
            raise self.closing_error
        return self.closes

    def reconcile(self) -> float | None:
        return asyncio.run(self.reconciler.reconcile(KEY))


def test_refusal_of_an_applied_plan_is_remembered() -> None:
    rig = Rig()
    rig.applier.refusal = Refusal(Obstacle.QUOTA, "exceeded quota", NOW)
    rig.reconcile()
    memory = rig.jobs.find(KEY)
    assert memory is not None
    assert memory.refusal == rig.applier.refusal


def test_job_is_reconciled_again_at_once_after_a_foreign_pod_was_found() -> None:
    rig = Rig()
    assert rig.reconcile() != 0.0
    rig.observer.foreign = frozenset({0})
    assert rig.reconcile() == 0.0


C10D = {"rendezvous": {"backend": "C10d"}}


@pytest.mark.parametrize(
    ("spec", "index", "seconds"),
    [
        (C10D, 0, UNWATCHED_SECONDS),
        (C10D, 1, None),
        ({**C10D, "runPolicy": {"suspend": True}}, 0, None),
        ({}, 0, None),
    ],
    ids=["name of the store's host", "another name", "suspended", "no store in a pod"],
)
def test_job_that_needs_the_name_of_a_foreign_pod_is_reconciled_again_soon(
    spec: Json, index: int, seconds: float | None
) -> None:
    """The end of a foreign pod triggers no reconcile."""
    rig = Rig()
    rig.api.spec = spec
    rig.observer.foreign = frozenset({index})
    rig.observer.before = observed(foreign=frozenset({index}))
    assert rig.reconcile() == seconds


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
        assert rig.reconcile() == 0.0, "again, at once"
    else:
        with pytest.raises(Retry):
            rig.reconcile()
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
            rig.reconcile()
    assert set(rig.recorder.posted) == {"PodsCreated"}
    rig.api.error = None
    rig.api.status = document if written else {}
    for _ in range(2):
        rig.reconcile()
        rig.api.status = document
    assert [rig.recorder.posted.count(reason) for reason in ("RoundFinal", "Running")] == [1, 1]


def test_status_without_the_fields_that_its_crd_lacks_is_written_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.api.unknown = frozenset({"launch", "wantedNodes"})
    for _ in range(3):
        rig.reconcile()
    assert len(rig.api.writes) == 1
    assert "wantedNodes" not in rig.api.status
    assert rig.recorder.posted.count("StatusFieldsDropped") == 1
    assert rig.recorder.posted.count("LaunchDecided") == 1
    [warning] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "lacks status.launch, status.wantedNodes: apply crds/" in warning


ALL_KNOWN = frozenset({"none"})


def kept_statuses(rig: Rig) -> list[bool]:
    """Return whether each job's status is kept in memory."""
    return [memory.sent is not None for memory in rig.jobs]


def test_status_of_a_release_without_fields_with_defaults_has_no_dropped_fields() -> None:
    rig = Rig()
    rig.api.unknown = ALL_KNOWN
    rig.reconcile()
    del rig.api.status["rendezvous"]["heldBack"], rig.api.status["restarts"]
    rig.api.generation += 1
    rig.reconcile()
    assert len(rig.api.writes) == 2
    assert "StatusFieldsDropped" not in rig.recorder.posted
    assert kept_statuses(rig) == [False]


def test_status_of_a_corrected_job_has_no_dropped_fields() -> None:
    rig = Rig()
    rig.api.unknown = ALL_KNOWN
    rig.api.spec = {"minNodes": "many"}
    rig.reconcile()
    assert "members" not in rig.api.status
    rig.api.spec, rig.api.generation = {}, 4
    rig.reconcile()
    assert len(rig.api.writes) == 2
    assert "StatusFieldsDropped" not in rig.recorder.posted
    assert kept_statuses(rig) == [False]


def test_dropped_fields_are_found_although_the_status_lacks_fields_with_defaults() -> None:
    rig = Rig()
    rig.api.unknown = ALL_KNOWN
    rig.reconcile()
    del rig.api.status["rendezvous"]["heldBack"]
    rig.api.unknown = frozenset({"wantedNodes"})
    rig.api.status["wantedNodes"] = 7
    rig.reconcile()
    rig.reconcile()
    assert len(rig.api.writes) == 2
    assert rig.recorder.posted.count("StatusFieldsDropped") == 1
    assert kept_statuses(rig) == [True]


def test_field_that_the_crd_has_again_is_written_with_the_next_change() -> None:
    rig = Rig()
    rig.api.unknown = frozenset({"wantedNodes"})
    rig.reconcile()
    rig.api.unknown = frozenset({"none"})
    rig.api.generation += 1
    rig.reconcile()
    assert rig.api.status["wantedNodes"] == 4
    rig.reconcile()
    assert len(rig.api.writes) == 2


@pytest.mark.parametrize("spec", [{}, {"minNodes": "many"}], ids=["quiet", "set aside"])
def test_unchanged_status_has_the_dropped_fields_after_the_crd_was_upgraded(spec: Json) -> None:
    rig = Rig()
    rig.api.unknown, rig.api.spec = frozenset({"explanation"}), spec
    rig.reconcile()
    rig.api.unknown = ALL_KNOWN
    for rig.time in (RESEND_SECONDS - 1, RESEND_SECONDS, 2 * RESEND_SECONDS):
        posted = [*rig.recorder.posted]
        rig.reconcile()
        assert {*rig.recorder.posted[len(posted) :]} <= {"PodsCreated"}
        assert ("explanation" in rig.api.status) is (rig.time >= RESEND_SECONDS)
    assert len(rig.api.writes) == 2
    assert kept_statuses(rig) == [False]


@pytest.mark.parametrize(
    ("error", "kept", "posted"),
    [
        (Forbidden("patch poddisruptionbudgets default/job", "a policy"), {}, True),
        (QuotaExceeded("create services default/job", "exceeded quota"), {}, True),
        (Unreachable("delete elasticjobs default/job", "failed calling webhook", 500), {}, True),
        (Forbidden("delete pods default/job-0", "a policy"), {"job-0": "a policy"}, False),
        (Unreachable("patch poddisruptionbudgets default/job", "no route"), {}, False),
        (Unreachable("create services default/job", "etcdserver: timed out", 500), {}, False),
        (Conflict("patch poddisruptionbudgets default/job", "changed"), {}, False),
        (NotServed("default", ""), {}, False),
    ],
)
def test_refused_request_of_a_running_job_is_an_event(
    error: KubeError, kept: dict[str, str], posted: bool
) -> None:
    rig = Rig()
    rig.applier.error, rig.applier.kept = error, kept
    with pytest.raises(Retry):
        rig.reconcile()
    assert ("WriteRefused" in rig.recorder.posted) == posted
    assert rig.api.writes, "the status is written nevertheless"


LATE = {"runPolicy": {"activeDeadlineSeconds": 100}}
PATIENT = {"elasticity": {"pendingTimeoutSeconds": 90}}


@pytest.mark.parametrize("kind", ["owned object", "pods", "status"])
@pytest.mark.parametrize(
    ("spec", "started", "since", "due"),
    [
        (LATE, 60, None, 40.0),
        (LATE, 100, None, 0.0),
        ({}, 60, None, None),
        (PATIENT, 60, 20, 70.0),
        (LATE, None, None, 100.0),
    ],
    ids=["deadline", "end in this pass", "no deadline", "pending timeout", "start in this pass"],
)
def test_refused_request_does_not_postpone_the_deadlines_of_the_job(
    kind: str, spec: Json, started: int | None, since: int | None, due: float | None
) -> None:
    rig = Rig()
    rig.api.spec = spec
    if started is not None:
        start = ago(started).strftime("%Y-%m-%dT%H:%M:%SZ")
        rig.api.status = {"phase": "Running", "startTime": start}
    if since is not None:
        refusal = Refusal(Obstacle.QUOTA, "exceeded quota", ago(since))
        rig.observer.before = observed(refusal=refusal)
    if kind == "pods":
        rig.applier.refusal = Refusal(Obstacle.QUOTA, "exceeded quota", NOW)
        rig.applier.refused = True
    elif kind == "status":
        rig.api.error = Forbidden("patch elasticjobs default/job", "a policy")
        due = None if started is None else due or None  # neither start nor end is stored
    else:
        rig.applier.error = Forbidden("create services default/job", "a policy")
    with pytest.raises(Retry) as caught:
        rig.reconcile()
    assert caught.value.due_seconds == due


@pytest.mark.parametrize("kind", ["owned object", "budget", "status"])
def test_refused_request_does_not_delay_the_actions_after_the_end_of_the_job(kind: str) -> None:
    """They count from the end, which only the status of this pass defines."""
    rig = Rig(view=closed(OutcomeKind.SUCCEEDED))
    rig.api.status = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
    rig.observer.before = observed(*running(1), view=rig.observer.view)
    error = Forbidden("patch", "a policy")
    if kind == "status":
        rig.api.error = error
    elif kind == "budget":
        rig.budgets.error = error
    else:
        rig.applier.error = error
    with pytest.raises(Retry) as caught:
        rig.reconcile()
    assert caught.value.due_seconds == (None if kind == "status" else 0.0)
    if kind != "status":
        rig.api.status = merged_with(rig.api.status, rig.api.writes[-1]["status"])
        assert rig.api.status["phase"] == "Succeeded"
        with pytest.raises(Retry) as caught:
            rig.reconcile()
        assert caught.value.due_seconds != 0.0, "once: the request is refused again"


def test_refused_deletion_of_the_budget_of_a_finished_job_is_an_event() -> None:
    rig = Rig()
    rig.api.spec = {"runPolicy": {"ttlSecondsAfterFinished": 100}}
    ended = ago(70).strftime("%Y-%m-%dT%H:%M:%SZ")
    rig.api.status = {"phase": "Succeeded", "completionTime": ended}
    rig.observer.before = observed(*running(1))
    rig.budgets.error = Forbidden("delete poddisruptionbudgets default/job", "a policy")
    with pytest.raises(Retry) as caught:
        rig.reconcile()
    assert "WriteRefused" in rig.recorder.posted
    assert caught.value.due_seconds is not None, "its TTL does not wait for the back-off"
    assert caught.value.due_seconds <= 30.0


def newer(**changes: Any) -> Json:
    """Return a status of a running job as a newer release might write it."""
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = next_status(job(), observed(), NO_MEMBERS, NOW).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    low = {"type": "QuotaLow", "status": "True", "reason": "Low", **at}
    return {**status, "conditions": [*status["conditions"], low], **changes}


@pytest.mark.parametrize("changes", [{}, {"phase": "Paused"}, {"launch": {"mode": "PerRack"}}])
def test_unknown_parts_of_a_status_are_logged_once_and_replaced(
    changes: Json, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    rig.api.status = newer(**changes)
    rig.api.error = Forbidden("patch", "a policy")
    for _ in range(2):
        with pytest.raises(Retry):
            rig.reconcile()
    assert caplog.text.count("parts of the status that this release cannot read") == 1
    assert "status.conditions[" in caplog.text
    assert "QuotaLow" in caplog.text
    assert all(value in caplog.text for value in ("Paused", "PerRack") if value in str(changes))
    rig.api.error = None
    rig.reconcile()
    rig.api.status = merged_with(rig.api.status, rig.api.writes[-1]["status"])
    assert "StatusRefused" in rig.recorder.posted
    assert "InvalidJob" not in rig.recorder.posted
    assert parsed_problems(rig.api.status) == []
    assert rig.api.status["phase"] == "Pending"
    count = len(rig.api.writes)
    rig.reconcile()
    assert len(rig.api.writes) == count, "the operator's own status is not written again"


def parsed_problems(status: Json) -> list[Problem]:
    ignored: list[Problem] = []
    parse_manifest({**manifest(nodes=4), "status": status}, ignored)
    return ignored


def test_conflict_over_a_quota_causes_no_back_off() -> None:
    rig = Rig()
    rig.applier.error = QuotaConflict("create pods", "the object has been modified", 409)
    assert rig.reconcile() == QUOTA_CONFLICT_SECONDS
    rig.applier.error = Conflict("create pods", "the object has been modified", 409)
    with pytest.raises(Retry):
        rig.reconcile()


def test_unchanged_status_is_sent_once_per_interval_while_fields_are_dropped() -> None:
    rig = Rig()
    rig.api.unknown = frozenset({"explanation"})
    for rig.time in (0.0, RESEND_SECONDS, RESEND_SECONDS + 1, 2 * RESEND_SECONDS):
        rig.reconcile()
    assert len(rig.api.writes) == 3
    assert rig.api.writes[1]["status"] == rig.api.writes[2]["status"]
    assert [*rig.api.writes[1]["status"]] == ["explanation"]
    assert rig.recorder.posted.count("StatusFieldsDropped") == 1


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "not stored"])
def test_dropped_fields_are_kept_although_the_answer_to_their_write_was_lost(stored: bool) -> None:
    rig = Rig()
    rig.applier.seconds = 2.0  # so that a start time set anew would differ
    rig.api.unknown = frozenset({"startTime"})
    rig.reconcile()
    rig.api.generation += 1
    no_answer = Unreachable("patch", "no answer")
    rig.api.error, rig.api.lost = (None, no_answer) if stored else (no_answer, None)
    with pytest.raises(Retry):
        rig.reconcile()
    rig.api.error = rig.api.lost = None
    for rig.api.generation in (4, 4, 5):
        rig.reconcile()
    assert len(rig.api.writes) == 3
    assert len({write["status"]["startTime"] for write in rig.api.writes}) == 1
    assert rig.api.status["observedGeneration"] == 5


def test_status_that_another_writer_changed_is_written_again_although_fields_are_dropped() -> None:
    rig = Rig()
    rig.api.unknown = frozenset({"wantedNodes"})
    rig.reconcile()
    rig.api.status = {**rig.api.status, "restarts": 7}
    rig.reconcile()
    assert len(rig.api.writes) == 2
    assert rig.api.status["restarts"] == 0


def test_status_of_a_job_set_aside_is_written_once_although_fields_are_dropped() -> None:
    rig = Rig()
    rig.api.unknown = frozenset({"explanation"})
    rig.api.spec = {"minNodes": "many"}
    for _ in range(3):
        rig.reconcile()
    assert len(rig.api.writes) == 1


def test_job_with_a_refused_store_is_observed_without_it() -> None:
    rig = Rig(source=EtcdRefused(Obstacle.ENDPOINT, "not allowed"))
    rig.reconcile()
    [source] = rig.observer.seen
    assert not source.usable
    memory = rig.jobs.find(KEY)
    assert memory is not None
    assert memory.refusal == Refusal(Obstacle.ENDPOINT, "not allowed", NOW)


def test_settling_source_keeps_the_status() -> None:
    rig = Rig(source=FakeSource(settling=True))
    rig.reconcile()
    memory = rig.jobs.recall(KEY, "job-uid")
    memory.change.note(3.0)
    assert rig.reconcile() == SETTLING_SECONDS
    assert rig.api.writes == []
    assert memory.change.at == 3.0, "its change is not shown yet"
    assert rig.recorder.posted == ["PodsCreated"] * 2


FULL = StoreTrouble(ETCD, StoreState.REFUSING, "etcd:2379", "database space exceeded", 1)
TRAINS = final_round(2)
TRAINS = replace(TRAINS, members=tuple(replace(one, saves=True) for one in TRAINS.members))


@pytest.mark.parametrize(("lasted", "phase"), [(9, "Running"), (11, "Suspending")])
def test_status_follows_the_plans_access_to_the_store(lasted: float, phase: str) -> None:
    """The limit of the wait may pass between the two: the checkpoint is requested after all."""
    rig = Rig(view=TRAINS)
    store, bounds = SeenTrouble(FULL, seconds=lasted), RendezvousParams(1, 2)
    rig.observer.before = observed(*running(2), view=TRAINS, store=store, bounds=bounds)
    rig.api.spec = {"runPolicy": {"suspend": True}}
    rig.applier.seconds = 2.0
    rig.reconcile()
    [written] = rig.api.writes
    assert written["status"]["phase"] == phase
    assert ("NotSaved" in rig.recorder.posted) is (phase == "Suspending")


@pytest.mark.parametrize(("refused", "again"), [(True, None), (False, 0.0)])
def test_resumption_does_not_poll_a_store_that_refuses_the_record_of_its_suspension(
    refused: bool, again: float | None
) -> None:
    rig = Rig(view=TRAINS)
    store, bounds = SeenTrouble(FULL) if refused else None, RendezvousParams(1, 2)
    rig.observer.before = observed(view=TRAINS, store=store, bounds=bounds)
    rig.api.status = {"phase": "Suspended"}
    assert rig.reconcile() == again
    [written] = rig.api.writes
    assert "phase" not in written["status"], "it stays Suspended"


def test_resumption_does_not_poll_for_the_end_of_a_requested_checkpoint() -> None:
    """The job's grace period grew during its suspension."""
    rig, since_ms = Rig(view=TRAINS), int(ago(30).timestamp() * 1000)
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    bounds = replace(RendezvousParams(1, 2), closing=ClosingRequest(outcome, since_ms))
    rig.observer.before = observed(view=TRAINS, bounds=bounds)
    rig.api.status = {"phase": "Suspended"}
    spec = {**manifest()["spec"]["template"]["spec"], "terminationGracePeriodSeconds": 60}
    rig.api.spec = {"template": {"spec": spec}}
    assert rig.reconcile() == 60 - STOP_MARGIN_SECONDS + COORDINATOR_SECONDS - 30


@pytest.mark.parametrize("refusal", [None, EtcdRefused(Obstacle.SECRET, "there must be a Secret")])
def test_resumption_with_an_unreadable_etcd_is_tried_again_with_a_back_off(
    refusal: EtcdRefused | None,
) -> None:
    rig = Rig(view=UNREADABLE, source=refusal)
    rig.observer.before = observed(view=UNREADABLE)
    rig.api.status = {"phase": "Suspended", "rendezvous": {"round": 3}}
    with pytest.raises(Retry, match="Secret" if refusal else "its etcd is unreadable"):
        rig.reconcile()
    [written] = rig.api.writes
    assert "phase" not in written["status"], "it stays Suspended"
    assert ("refusal" in written["status"]) is (refusal is not None)


def test_written_status_includes_the_pending_change() -> None:
    rig = Rig()
    memory = rig.jobs.recall(KEY, "job-uid")
    memory.change.note(3.0)
    rig.reconcile()
    assert memory.change.at is None
    assert memory.report.version == "8"


def test_rendezvous_of_a_deleted_job_is_closed() -> None:
    rig = Rig()
    rig.reconcile()
    rig.api.deleted = True
    assert rig.reconcile() is None
    assert rig.closed == ["job-uid"]
    assert rig.jobs.find(KEY) is None
    assert rig.jobs.deleted == {("default", "job-uid")}


@pytest.mark.parametrize("error", [None, Forbidden("delete pods job-1", "denied", 403)])
def test_pods_without_owner_are_deleted_after_their_job(error: KubeError | None) -> None:
    rig = Rig()
    rig.reconcile()
    memory = rig.jobs.recall(KEY, "job-uid")
    memory.pods = PodMemory(unowned={"uid-1": "job-1"})
    rig.api.deleted, rig.api.error = True, error
    assert rig.reconcile() is None
    assert rig.api.removed == ([] if error else [("job-1", "uid-1")])
    assert rig.jobs.find(KEY) is None


LOST = EtcdError("txn", "etcd:2379", "no answer")


@pytest.mark.parametrize("error", [LOST, None], ids=["refusing", "lost"])
@pytest.mark.parametrize("returns", [True, False])
def test_deleted_job_waits_for_its_store_as_at_other_stops(
    error: EtcdError | None, returns: bool
) -> None:
    """A job that is deleted in the foreground waits as long: then the resync closes it."""
    rig = Rig()
    rig.reconcile()
    rig.api.deleted, rig.closing_error, rig.closes = True, error, False
    assert rig.reconcile() == WAIT_SECONDS
    assert rig.jobs.find(KEY) is not None, "its store wakes it"
    rig.time = 4.0
    if returns:
        rig.closing_error, rig.closes = None, True
    assert rig.reconcile() == (None if returns else WAIT_SECONDS - 4)
    rig.time = WAIT_SECONDS
    assert rig.reconcile() is None
    assert len(rig.closed) == (2 if returns else 3)
    assert rig.jobs.find(KEY) is None
    assert rig.jobs.deleted == {("default", "job-uid")}


def test_job_does_not_wait_for_the_store_of_its_deleted_predecessor() -> None:
    rig = Rig()
    rig.jobs.recall(KEY, "uid-of-the-predecessor")
    rig.closing_error = LOST
    rig.reconcile()
    assert rig.closed == ["uid-of-the-predecessor"]
    assert len(rig.api.writes) == 1
    assert rig.jobs.deleted == {("default", "uid-of-the-predecessor")}


def broken() -> None:
    raise ZeroDivisionError("no size is divisible by it")


def endless() -> None:
    while True:
        pass


def too_large() -> None:
    raise MemoryError


FAULTS = {
    "an error": (broken, ZeroDivisionError, MAX_FAULTS, "ReconcileFailed"),
    "no end": (endless, TooLong, 1, "ReconcileTooLong"),
    "too little memory": (too_large, MemoryError, MAX_EXCESSES, "ReconcileTooLarge"),
}


def set_aside(rig: Rig, fault: Callable[[], None], error: type[Exception], most: int) -> None:
    """Let the job's reconciles fail until it is set aside."""
    rig.observer.fault = fault
    for _ in range(most - 1):
        with pytest.raises(error):
            rig.reconcile()
    assert rig.api.writes == []
    assert rig.reconcile() is None


@pytest.mark.parametrize(("fault", "error", "most", "reason"), FAULTS.values(), ids=FAULTS)
def test_job_with_repeated_faults_is_set_aside(
    fault: Callable[[], None], error: type[Exception], most: int, reason: str
) -> None:
    rig = Rig()
    set_aside(rig, fault, error, most)
    [write] = rig.api.writes
    conditions = {one["type"]: one for one in write["status"]["conditions"]}
    assert conditions["Stalled"]["status"] == "True"
    assert conditions["Stalled"]["reason"] == reason
    assert (conditions["Ready"]["status"], conditions["Reconciling"]["status"]) == ("False",) * 2
    assert write["status"]["observedGeneration"] == 3
    assert rig.recorder.posted == [reason]


def test_job_that_is_set_aside_is_not_reconciled_before_its_generation_changes() -> None:
    rig = Rig()
    set_aside(rig, broken, ZeroDivisionError, MAX_FAULTS)
    rig.api.status = rig.api.writes[0]["status"]
    rig.observer.fault = lambda: None
    tries = len(rig.observer.seen)
    assert rig.reconcile() is None
    assert (len(rig.observer.seen), len(rig.api.writes)) == (tries, 1)
    rig.api.generation += 1
    rig.reconcile()
    assert len(rig.observer.seen) == tries + 1
    stalled = next(
        one for one in rig.api.writes[-1]["status"]["conditions"] if one["type"] == "Stalled"
    )
    assert stalled["status"] == "False"


def test_status_of_a_job_that_is_set_aside_is_written_again_after_a_conflict() -> None:
    rig = Rig(Conflict("patch", "it has changed"))
    rig.observer.fault = broken
    for _ in range(MAX_FAULTS - 1):
        with pytest.raises(ZeroDivisionError):
            rig.reconcile()
    assert rig.reconcile() == 0.0, "again, at once"
    rig.api.error = None
    rig.reconcile()
    assert len(rig.api.writes) == 1


def test_faults_in_between_successes_do_not_set_a_job_aside() -> None:
    rig = Rig()
    for _ in range(MAX_FAULTS + 1):
        rig.observer.fault = broken
        with pytest.raises(ZeroDivisionError):
            rig.reconcile()
        rig.observer.fault = lambda: None
        rig.reconcile()


def test_next_process_sets_a_job_aside_after_one_more_fault() -> None:
    rig = Rig()
    set_aside(rig, broken, ZeroDivisionError, MAX_FAULTS)
    after = Rig()
    after.api.status = rig.api.writes[0]["status"]
    after.observer.fault = broken
    assert after.reconcile() is None
    assert after.api.writes == [], "its status says so already"


def test_expected_errors_never_set_a_job_aside() -> None:
    rig = Rig()

    def no_answer() -> None:
        raise Unreachable("list", "no answer")

    rig.observer.fault = no_answer
    for _ in range(MAX_FAULTS + 1):
        with pytest.raises(Retry):
            rig.reconcile()
    assert rig.api.writes == []


def test_stored_job_beyond_the_bounds_is_set_aside_with_its_field() -> None:
    rig = Rig()
    rig.api.spec = {"maxNodes": 2**31 - 1}
    assert rig.reconcile() is None
    [write] = rig.api.writes
    stalled = next(one for one in write["status"]["conditions"] if one["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidJob")
    assert "spec.maxNodes: must be at most 16384; got 2147483647" in stalled["message"]
    assert stalled["message"] in write["status"]["explanation"][0]
    rig.api.status = write["status"]
    assert rig.reconcile() is None
    assert (len(rig.api.writes), rig.recorder.posted) == (1, ["InvalidJob"])
    rig.api.spec, rig.api.generation = {}, 4
    rig.reconcile()
    assert rig.observer.seen


def test_reconcile_that_does_not_end_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(reconcile_seconds=0.05)

    async def never(self: Registry, job: ElasticJob) -> RendezvousSource:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(Registry, "of", never)
    for _ in range(MAX_FAULTS + 1):
        with pytest.raises(Retry, match=r"took longer than 0\.05 s"):
            rig.reconcile()
    assert rig.api.writes == []


def test_deletions_left_before_their_end_continue_at_once_after_a_refusal() -> None:
    rig = Rig()
    rig.applier.error = Forbidden("delete pods job-0", "denied", 403)
    rig.applier.unfinished = True
    with pytest.raises(Retry, match="denied"):
        rig.reconcile()
    rig.applier.deleted = frozenset({"uid-1"})
    assert rig.reconcile() == 0.0
    rig.applier.unfinished = False
    with pytest.raises(Retry, match="denied"):
        rig.reconcile()


def test_plan_left_before_its_end_is_continued_at_once() -> None:
    rig = Rig()
    rig.applier.unfinished = True
    assert rig.reconcile() == 0.0
    assert len(rig.api.writes) == 1, "after the status was written"
