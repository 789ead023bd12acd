"""Reconcile of one job: observe, plan, apply, write the status once, then post events."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from elasticjob_operator.domain.json_object import merge_patch
from elasticjob_operator.domain.observed.state import Observed, Refusal
from elasticjob_operator.domain.plan.backends import STORE_INDEX, is_steered, keeps_store
from elasticjob_operator.domain.plan.closing_checkpoint import WAIT_SECONDS
from elasticjob_operator.domain.plan.lifecycle import (
    FINISHED,
    STOPPING,
    access_ends_at,
    awaits_resumption,
)
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.domain.status.events import (
    deletions_refused,
    job_events,
    labels_lost,
    owner_lost,
    settled_rounds,
    status_refused,
    stepped_rounds,
    template_warnings,
    without_recent_changes,
    write_refused,
)
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.domain.status.set_aside import SetAside, SetAsideReason
from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    PODS,
    Conflict,
    Forbidden,
    Invalid,
    Json,
    KubeError,
    NotFound,
    QuotaConflict,
    Unreachable,
)
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.logs import of_job
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import (
    ElasticJob,
    InvalidManifest,
    Phase,
    Problem,
    Status,
    parse_manifest,
)
from elasticjob_operator.reconcile.cluster import Applied
from elasticjob_operator.reconcile.fault_guard import NOW_SECONDS, RECONCILE_SECONDS, FaultGuard
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, Jobs
from elasticjob_operator.reconcile.owned_objects import forget_access, note_revoked
from elasticjob_operator.reconcile.plan_pass import (
    EXPECTED,
    JobObserver,
    Pass,
    PlanApplier,
    deadline_by,
    run_pass,
    seconds_until,
)
from elasticjob_operator.reconcile.processor_time import ProcessorTime
from elasticjob_operator.reconcile.refusals import is_refusal
from elasticjob_operator.reconcile.resync import CLEANUP_ERRORS
from elasticjob_operator.reconcile.status_writer import EventSink, JobApi, StatusWriter
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.etcd_registry import EtcdRefused
from elasticjob_operator.rendezvous.etcd_source import SETTLING_SECONDS
from elasticjob_operator.rendezvous.sources import RendezvousSource, UnusableSource

log = logging.getLogger(__name__)

UNPOSTED_EVENTS_TIME = timedelta(minutes=2)
"""Age up to which events may be missing after a crash; exceeds the time of a failover."""
QUOTA_CONFLICT_SECONDS = 1.0
"""Pause after a request that conflicted with others over a ResourceQuota for its whole timeout."""
MOST_IGNORED = 5
"""Maximum number of problems of a stored status in the log."""
UNWATCHED_SECONDS = 10.0
"""Reconcile interval of a job that waits for a change of a pod that it does not watch."""


class Sources(Protocol):
    """Registry of the rendezvous sources."""

    async def of(self, job: ElasticJob) -> RendezvousSource:
        """Return the source of this job's rendezvous. Raises `EtcdRefused` or `KubeError`."""


class BudgetKeeper(Protocol):
    """Manager of the jobs' PodDisruptionBudgets."""

    async def drop_budget(self, job: ElasticJob, memory: JobMemory) -> None:
        """Delete the job's budget, if any."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies of the reconciler.

    Args:
        close_deleted_job: closes the rendezvous of a deleted job, by namespace and uid, at a time;
            returns True once it is closed; raises `CLEANUP_ERRORS`.
        clock: monotonic time in seconds.
        now: UTC time.
        reconcile_seconds: maximum duration of a reconcile.
    """

    kube: JobApi
    jobs: Jobs
    sources: Sources
    close_deleted_job: Callable[[str, str, datetime], Awaitable[bool]]
    observer: JobObserver
    applier: PlanApplier
    owned_objects: BudgetKeeper
    events: EventSink
    metrics: Metrics
    processor_time: ProcessorTime
    clock: Callable[[], float]
    now: Callable[[], datetime]
    reconcile_seconds: float = RECONCILE_SECONDS


class Reconciler:
    """Reconciler of jobs; the work queue calls `reconcile`."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._writer = StatusWriter(dependencies.kube, dependencies.events, dependencies.clock)
        self._guard = FaultGuard(
            dependencies.kube,
            dependencies.jobs,
            dependencies.events,
            self._writer,
            dependencies.now,
            dependencies.processor_time,
            dependencies.reconcile_seconds,
        )

    async def reconcile(self, key: JobKey) -> float | None:
        """Reconcile a job; return the seconds until the next reconcile is due.

        Raises:
            Retry: the pass could not be completed; trying again may help.
        """
        began = self._dependencies.clock()
        try:
            return await self._guard.run(key, self._reconcile(key))
        except Retry:
            raise
        except EXPECTED as error:
            raise Retry(str(error)) from error
        finally:
            self._dependencies.metrics.reconcile.observe(self._dependencies.clock() - began)

    async def _reconcile(self, key: JobKey) -> float | None:
        raw = await self._read(key)
        if raw is None:
            return self._closing_seconds(key)
        memory = self._dependencies.jobs.recall(key, raw["metadata"]["uid"])
        if (aside := self._guard.aside(memory, raw)) is not None:
            return await self._guard.keep_aside(memory, raw, aside)
        ignored: list[Problem] = []
        try:
            job = parse_manifest(raw, ignored)
        except InvalidManifest as error:  # only another release accepts it
            aside = SetAside(SetAsideReason.INVALID_JOB, str(error))
            return await self._guard.set_aside(memory, raw, aside)
        _note_ignored(memory, ignored)
        stored = job.status
        if (sent := self._writer.sent(memory, raw)) is not None:
            job = job.model_copy(update={"status": Status.model_validate(sent)})
        changed_at = memory.change.take()
        source = await self._source(job, memory)
        done = await run_pass(
            job,
            memory,
            source,
            self._dependencies.observer,
            self._dependencies.applier,
            self._dependencies.now,
        )
        seen, applied = done.observation.observed, done.applied
        self._record_changed_pods(job, memory, seen)
        memory.refusal = applied.refusal
        if done.wrote_nodes:
            memory.change.restore(changed_at)
            self._record_events(job, job.status, job.status, applied)
            return NOW_SECONDS
        observed = self._dependencies.observer.observe_again(job, memory, source, seen, applied)
        if source.is_settling(self._dependencies.clock()):
            memory.change.restore(changed_at)
            self._record_events(job, job.status, job.status, applied)
            return SETTLING_SECONDS
        before = stored if raw.get("status") else None
        due = done.due_seconds(job, job.status, self._dependencies.now())
        try:
            status = await self._write_status(job, raw, before, memory, observed, done, changed_at)
            if status is None:
                return NOW_SECONDS
            if applied.unfinished and applied.deleted:
                return NOW_SECONDS  # a refused deletion must not delay the others
            if isinstance(applied.error, QuotaConflict):
                return QUOTA_CONFLICT_SECONDS  # other requests cause it, not the job
            due = done.due_seconds(job, status, self._dependencies.now())
            if applied.error is not None:
                if not applied.kept:  # pods that cannot be deleted have an event of their own
                    self._record_refused(job, applied.error)
                raise Retry(str(applied.error), due_seconds=due) from applied.error
            if is_steered(job) and awaits_resumption(job, status.phase):
                _check_readable(observed)
            seconds = await self._next(job, memory, done, due)
            revoke = await self._revoke(job, memory, source, observed)
        except Retry:
            raise
        except EXPECTED as error:
            raise Retry(str(error), due_seconds=due) from error
        return _soonest(seconds, self._due_by(job, status, done.planned), revoke)

    async def _next(
        self, job: ElasticJob, memory: JobMemory, done: Pass, due: float | None
    ) -> float | None:
        seen, applied = done.observation.observed, done.applied
        if applied.unfinished or memory.pods.foreign != seen.foreign:
            return NOW_SECONDS  # the next plan uses the next free name
        if applied.refused and memory.refusal is not None:
            message = f"pods cannot be created: {memory.refusal.message}"
            raise Retry(message, kind=memory.refusal.obstacle.value, due_seconds=due)
        if memory.report.phase in FINISHED and any(pod.active for pod in seen.pods):
            await self._drop_budget(job, memory)
        again = UNWATCHED_SECONDS if _awaits_unwatched_pod(job, memory) else None
        wake_at, refused = done.planned.wake_at, memory.nodes_refusal
        write_at = refused.retry_at if refused is not None else None
        now = self._dependencies.now()
        return _soonest(_due_seconds(wake_at, now), _due_seconds(write_at, now), again)

    async def _drop_budget(self, job: ElasticJob, memory: JobMemory) -> None:
        try:
            await self._dependencies.owned_objects.drop_budget(job, memory)
        except KubeError as error:
            self._record_refused(job, error)
            raise

    def _record_refused(self, job: ElasticJob, error: Exception) -> None:
        """Post an event for a refused request that the status does not show."""
        if is_refusal(error):
            found = (write_refused(error.operation, error.message),)
            self._dependencies.events.record(Subject.of_job(job), found)

    async def _revoke(
        self, job: ElasticJob, memory: JobMemory, source: RendezvousSource, observed: Observed
    ) -> float | None:
        """Remove the user of a finished job; return the seconds until that is due."""
        due = None if memory.owned.revoked else access_ends_at(job, observed)
        if due is None or due > self._dependencies.now():
            return _due_seconds(due, self._dependencies.now())
        await source.revoke_access()
        note_revoked(memory)
        return None

    def _due_by(self, job: ElasticJob, status: Status, planned: Plan) -> float | None:
        """Return the seconds until a deadline that only the new status defines.

        The job's deadline counts from its start time, and the actions after the end from its end.
        A job to be resumed was waiting for the end of its suspension; the end of a refusal to
        record it wakes the job.
        """
        if status.phase is Phase.SUSPENDED and not job.spec.run_policy.suspend:
            waits = planned.access.refused or planned.wake_at is not None
            return None if waits else NOW_SECONDS
        if status.phase in FINISHED:
            return None if job.status.phase in FINISHED else NOW_SECONDS
        # Past its deadline, the job still runs only to save: the plan has the time of its end.
        return seconds_until(self._dependencies.now(), deadline_by(job, status))

    async def _read(self, key: JobKey) -> Json | None:
        """Read the job live; close and drop a deleted one of this name.

        As at other planned stops, the store of a deleted job is waited for up to `WAIT_SECONDS`:
        once it can be used, it wakes the job, whose pods are asked for a checkpoint then.
        """
        try:
            raw = await self._dependencies.kube.get(ELASTICJOBS, key.namespace, key.name)
        except NotFound:
            raw = None
        memory = self._dependencies.jobs.find(key)
        if memory is not None and (raw is None or raw["metadata"]["uid"] != memory.uid):
            closed = False
            try:
                closed = await self._dependencies.close_deleted_job(
                    key.namespace, memory.uid, self._dependencies.now()
                )
            except CLEANUP_ERRORS as error:  # must not delay another job of the same name
                log.warning(
                    "cannot close the rendezvous of the deleted job yet: %s",
                    error,
                    extra=of_job(key),
                )
            if memory.deleted_at is None:
                memory.deleted_at = self._dependencies.clock()
                await self._delete_unowned(memory)
            if closed or raw is not None or not self._closing_seconds(key):
                self._dependencies.jobs.forget(key)
                log.info("deleted", extra=of_job(key))
        return raw

    async def _delete_unowned(self, memory: JobMemory) -> None:
        """Delete the pods of a deleted job that garbage collection does not find."""
        for uid, name in {**memory.withdrawn.pods, **memory.pods.unowned}.items():
            try:
                await self._dependencies.kube.delete(PODS, memory.key.namespace, name, uid=uid)
            except KubeError as error:
                log.warning(
                    "cannot delete unowned pod %s: %s", name, error, extra=of_job(memory.key)
                )

    def _closing_seconds(self, key: JobKey) -> float | None:
        """Return the seconds for which the store of a deleted job is waited for; None for none."""
        memory = self._dependencies.jobs.find(key)
        if memory is None or memory.deleted_at is None:
            return None
        left = memory.deleted_at + WAIT_SECONDS - self._dependencies.clock()
        return left if left > 0 else None

    async def _source(self, job: ElasticJob, memory: JobMemory) -> RendezvousSource:
        try:
            return await self._dependencies.sources.of(job)
        except EtcdRefused as error:
            now = self._dependencies.now()
            memory.refusal = Refusal.after(memory.refusal, error.obstacle, str(error), now)
            forget_access(memory)  # its user may be gone
            return UnusableSource()

    async def _write_status(
        self,
        job: ElasticJob,
        raw: Json,
        stored: Status | None,
        memory: JobMemory,
        observed: Observed,
        done: Pass,
        changed_at: float | None,
    ) -> Status | None:
        """Write the status if it differs or is due; return it, or None if the job has changed.

        `stored` is that of the object; the job's may have more fields than its CRD.
        """
        now, applied = self._dependencies.now(), done.applied
        status = next_status(job, observed, observed.rendezvous, now, done.planned.access)
        memory.report = replace(memory.report, phase=status.phase, goodput=_goodput(status))
        document: Json = {}
        patch: Json = {}
        ignored = memory.report.ignored
        if stored is None or job.status != status or ignored or self._writer.is_due(memory):
            document = _document(status)
            known = _document(stored) if stored else {}
            patch = merge_patch({**known, **_unread(raw, ignored)}, document)
            if not patch:
                self._writer.forget(memory)
        if patch:
            try:
                written = await self._writer.write(memory, raw, patch, document)
            except KubeError as error:
                memory.change.restore(changed_at)
                self._record_events(job, job.status, job.status, applied)  # the applied actions
                if isinstance(error, Conflict | NotFound):
                    return None
                if isinstance(error, Forbidden | Invalid):  # nothing else shows it to the user
                    refused = (status_refused(error.message),)
                    self._dependencies.events.record(Subject.of_job(job), refused)
                if isinstance(error, Unreachable) and memory.report.unanswered is None:
                    memory.report = replace(memory.report, unanswered=job.status)
                raise
            memory.report = replace(memory.report, version=written["metadata"]["resourceVersion"])
            self._dependencies.metrics.status_writes.inc()
            if changed_at is not None:
                self._dependencies.metrics.status_lag.observe(
                    self._dependencies.clock() - changed_at
                )
        # Post the events of an earlier status write without an answer, written or not.
        before = memory.report.unanswered or job.status
        memory.report = replace(memory.report, unanswered=None)
        self._record_events(job, self._posted_status(memory, before), status, applied)
        for found in settled_rounds(before, status):
            self._dependencies.metrics.observe_round(found)
        for found in stepped_rounds(before, status):
            self._dependencies.metrics.observe_first_step(found)
        self._dependencies.metrics.observe_counts(before, status)
        return status

    def _posted_status(self, memory: JobMemory, before: Status) -> Status:
        """Return the status whose events were certainly posted.

        For a status written by a previous process this leaves out its newest changes, so only jobs
        that changed recently get an event posted twice.
        """
        if memory.report.posted:
            return before
        memory.report = replace(memory.report, posted=True)
        return without_recent_changes(before, self._dependencies.now() - UNPOSTED_EVENTS_TIME)

    def _record_changed_pods(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> None:
        """Post an event for each pod that lost its labels or its owner references."""
        unlabelled = [pod for pod in seen.pods if pod.lost_labels]
        unowned = [pod for pod in seen.pods if pod.lost_owner]
        before = memory.report
        events = [labels_lost(pod) for pod in unlabelled if pod.uid not in before.unlabelled]
        events += [owner_lost(pod) for pod in unowned if pod.uid not in before.unowned]
        memory.report = replace(
            before,
            unlabelled=frozenset(pod.uid for pod in unlabelled),
            unowned=frozenset(pod.uid for pod in unowned),
        )
        self._dependencies.events.record(Subject.of_job(job), events)

    def _record_events(
        self, job: ElasticJob, before: Status, after: Status, applied: Applied
    ) -> None:
        found = (
            *template_warnings(job, before, after),
            *job_events(before, after, applied.actions),
            *deletions_refused(applied.kept),
        )
        self._dependencies.events.record(Subject.of_job(job), found)


def _check_readable(observed: Observed) -> None:
    """Raise `Retry` while the rendezvous of a job to be resumed cannot be read."""
    if observed.rendezvous.readable:
        return
    if observed.refusal is None:
        raise Retry("cannot resume the job: its etcd is unreadable")
    message = f"cannot resume the job: {observed.refusal.message}"
    raise Retry(message, kind=observed.refusal.obstacle.value)


def _due_seconds(wake_at: datetime | None, now: datetime) -> float | None:
    """Return the seconds until the plan's wake-up time; None without one."""
    return None if wake_at is None else max((wake_at - now).total_seconds(), 0.0)


def _awaits_unwatched_pod(job: ElasticJob, memory: JobMemory) -> bool:
    """Return True if the job waits for a change of a pod that it does not watch.

    It is one that lost the label it is watched by, or another owner's pod with the name of the pod
    that hosts the job's store. Other names are skipped, and pods of deleted jobs are watched.
    """
    if memory.pods.unlisted:
        return True
    strangers = memory.pods.foreign - memory.pods.predecessors
    needs = memory.report.phase not in STOPPING and keeps_store(job, STORE_INDEX)
    return needs and STORE_INDEX in strangers


def _soonest(*seconds: float | None) -> float | None:
    return min((one for one in seconds if one is not None), default=None)


def _goodput(status: Status) -> int | None:
    """Return the goodput of an unfinished job; None if it is unknown."""
    known = None if status.phase in FINISHED else status.snapshots
    return None if known is None else known.goodput_percent


def _note_ignored(memory: JobMemory, ignored: Sequence[Problem]) -> None:
    """Keep the problems of the stored status, and log them once."""
    if ignored and tuple(ignored) != memory.report.ignored:
        text = "; ".join(map(str, ignored[:MOST_IGNORED]))
        more = len(ignored) - MOST_IGNORED
        log.warning(
            "ignores parts of the status that this release cannot read: %s%s",
            text,
            f"; and {more} more" if more > 0 else "",
            extra=of_job(memory.key),
        )
    memory.report = replace(memory.report, ignored=tuple(ignored))


def _unread(raw: Json, ignored: Iterable[Problem]) -> Json:
    """Return the fields of the stored status with ignored parts, which the next write replaces."""
    status = raw.get("status")
    if not isinstance(status, dict):
        return {}
    names = {str(problem.location[1]) for problem in ignored if len(problem.location) > 1}
    return {name: status[name] for name in names if name in status}


def _document(status: Status) -> Json:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
