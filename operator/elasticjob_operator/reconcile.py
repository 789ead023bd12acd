"""Reconcile of one job: observe, plan, apply, write the status once, then post events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from elasticjob_operator.agent_status import Agents
from elasticjob_operator.apply import EXPECTED, Applier
from elasticjob_operator.core.actions import WriteNodes
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.happenings import (
    happenings,
    invalid,
    perhaps_untold,
    settled_rounds,
    stepped_rounds,
    undeletable,
    unlabelled,
)
from elasticjob_operator.core.lifecycle import FINISHED, deadline
from elasticjob_operator.core.mergepatch import merge_patch
from elasticjob_operator.core.observed import Observed
from elasticjob_operator.core.plan import plan
from elasticjob_operator.core.status import next_status
from elasticjob_operator.departures import TROUBLE, close_departed
from elasticjob_operator.dependents import Dependents
from elasticjob_operator.etcds import SETTLING_SECONDS, Etcd, Etcds, Refused
from elasticjob_operator.events import Events, Subject
from elasticjob_operator.jobs import JobKey, JobMemory, Jobs
from elasticjob_operator.kube import (
    ELASTICJOBS,
    Conflict,
    Json,
    Kube,
    KubeError,
    NotFound,
    Unreachable,
)
from elasticjob_operator.logs import of_job
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob, InvalidManifest, Status, parse_manifest
from elasticjob_operator.observe import Observer, due_seconds, seen_again
from elasticjob_operator.task import Applied, Task
from elasticjob_operator.wakeups import Retry

log = logging.getLogger(__name__)

AT_ONCE_SECONDS = 0.0
UNTOLD_TIME = timedelta(minutes=2)
"""Age up to which events may be missing after a crash; exceeds the time of a failover."""
UNLISTED_SECONDS = 10.0
"""Reconcile interval of a job with a pod that lost the label it is watched by."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Dependencies of the reconciler. `clock` is monotonic, `now` is UTC."""

    kube: Kube
    jobs: Jobs
    etcds: Etcds
    observer: Observer
    applier: Applier
    dependents: Dependents
    events: Events
    metrics: Metrics
    clock: Callable[[], float]
    now: Callable[[], datetime]


class Reconciler:
    """Reconciler of jobs; the work queue calls `look`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def look(self, key: JobKey) -> float | None:
        """Reconcile a job; return the seconds until the next reconcile is due.

        Raises:
            Retry: the pass could not be completed; trying again may help.
        """
        began = self._parts.clock()
        try:
            return await self._look(key)
        except Retry:
            raise
        except EXPECTED as error:
            raise Retry(str(error)) from error
        finally:
            self._parts.metrics.reconcile.observe(self._parts.clock() - began)

    async def _look(self, key: JobKey) -> float | None:
        raw = await self._read(key)
        if raw is None:
            return None
        memory = self._parts.jobs.recall(key, raw["metadata"]["uid"])
        job = self._parse(memory, raw)
        if job is None:
            return None
        changed_at, memory.changed_at = memory.changed_at, None
        etcd = await self._etcd(job, memory)
        sight = await self._parts.observer.look(job, memory, etcd)
        self._tell_of_labels(job, memory, sight.observed)
        planned = plan(job, sight.observed, self._parts.now())
        first = planned.actions[:1]
        if first and isinstance(first[0], WriteNodes):
            # It changes the object: the remaining actions must follow from the changed one.
            planned = replace(planned, actions=first)
        task = Task(job, memory, etcd, sight)
        applied = await self._parts.applier.apply(task, planned)
        if any(isinstance(action, WriteNodes) for action in applied.actions):
            memory.changed_at = changed_at
            self._tell(job, job.status, job.status, applied)
            return AT_ONCE_SECONDS
        created = (self._parts.observer.pod(job, made) for made in applied.created)
        observed = seen_again(
            sight.observed,
            memory,
            etcd,
            job,
            tuple(pod for pod in created if pod is not None),
            frozenset(applied.deleted),
            self._parts.now(),
        )
        if etcd is not None and etcd.is_settling(self._parts.clock()):
            memory.changed_at = changed_at
            self._tell(job, job.status, job.status, applied)
            return SETTLING_SECONDS
        status = await self._write_status(job, raw, memory, observed, applied, changed_at)
        if status is None:
            return AT_ONCE_SECONDS
        if applied.error is not None:
            raise Retry(str(applied.error)) from applied.error
        seconds = await self._next(job, memory, sight.observed, applied, planned)
        return _soonest(seconds, self._due_by(job, status))

    async def _next(
        self,
        job: ElasticJob,
        memory: JobMemory,
        seen: Observed,
        applied: Applied,
        planned: Plan,
    ) -> float | None:
        if frozenset(memory.foreign) != seen.foreign:
            return AT_ONCE_SECONDS  # the next plan uses the next free name
        if applied.refused and memory.refusal is not None:
            message = f"pods cannot be created: {memory.refusal.message}"
            raise Retry(message, kind=memory.refusal.obstacle.value)
        if memory.phase in FINISHED and any(pod.active for pod in seen.pods):
            await self._parts.dependents.drop_budget(job, memory)
        again = UNLISTED_SECONDS if memory.unlisted else None
        return _soonest(due_seconds(planned.wake_at, self._parts.now()), again)

    def _due_by(self, job: ElasticJob, status: Status) -> float | None:
        """Return the seconds until a deadline that only the new status defines.

        The job's deadline counts from its start time, and the actions after the end from its end.
        """
        if status.phase in FINISHED:
            return None if job.status.phase in FINISHED else AT_ONCE_SECONDS
        after = job.model_copy(update={"status": status})
        return due_seconds(deadline(after), self._parts.now())

    async def _read(self, key: JobKey) -> Json | None:
        """Read the job live; drop a deleted predecessor of the same name."""
        try:
            raw = await self._parts.kube.get(ELASTICJOBS, key.namespace, key.name)
        except NotFound:
            raw = None
        known = self._parts.jobs.find(key)
        if known is not None and (raw is None or raw["metadata"]["uid"] != known.uid):
            try:
                await close_departed(self._parts.etcds, key.namespace, known.uid, self._parts.now())
            except TROUBLE as error:  # must not delay another job of the same name
                log.warning("deleted, the next resync closes it: %s", error, extra=of_job(key))
            self._parts.jobs.forget(key)
            log.info("deleted", extra=of_job(key))
        return raw

    def _parse(self, memory: JobMemory, raw: Json) -> ElasticJob | None:
        """Parse the job; None if only another version of this program understands it."""
        try:
            return parse_manifest(raw)
        except InvalidManifest as error:
            if memory.invalid != raw["metadata"]["resourceVersion"]:
                memory.invalid = raw["metadata"]["resourceVersion"]
                self._parts.events.tell(Subject.of(raw), (invalid(str(error)),))
            return None

    async def _etcd(self, job: ElasticJob, memory: JobMemory) -> Etcd | Agents | None:
        try:
            return await self._parts.etcds.of(job)
        except Refused as error:
            memory.refuse(error.obstacle, str(error), self._parts.now())
            return None

    async def _write_status(
        self,
        job: ElasticJob,
        raw: Json,
        memory: JobMemory,
        observed: Observed,
        applied: Applied,
        changed_at: float | None,
    ) -> Status | None:
        """Write the status if it differs; return it, or None if the job has changed meanwhile."""
        status = next_status(job, observed, observed.rendezvous, self._parts.now())
        memory.phase = status.phase
        patch = _status_patch(job.status if raw.get("status") else None, status)
        if patch:
            metadata = raw["metadata"]
            body = {
                "metadata": {
                    "uid": metadata["uid"],
                    "resourceVersion": metadata["resourceVersion"],
                },
                "status": patch,
            }
            try:
                written = await self._parts.kube.patch(
                    ELASTICJOBS, metadata["namespace"], metadata["name"], body, subresource="status"
                )
            except KubeError as error:
                memory.changed_at = changed_at
                self._tell(job, job.status, job.status, applied)  # post the applied actions
                if isinstance(error, Conflict | NotFound):
                    return None
                if isinstance(error, Unreachable) and memory.untold is None:
                    memory.untold = job.status
                raise
            memory.written = written["metadata"]["resourceVersion"]
            self._parts.metrics.status_writes.inc()
            if changed_at is not None:
                self._parts.metrics.status_lag.observe(self._parts.clock() - changed_at)
        # Post the events of an earlier status write without an answer, written or not.
        before, memory.untold = memory.untold or job.status, None
        self._tell(job, self._told_before(memory, before), status, applied)
        for found in settled_rounds(before, status):
            self._parts.metrics.observe_round(found)
        for found in stepped_rounds(before, status):
            self._parts.metrics.observe_first_step(found)
        self._parts.metrics.observe_counts(before, status)
        return status

    def _told_before(self, memory: JobMemory, before: Status) -> Status:
        """Return the status whose events were certainly posted.

        For a status written by a previous process this leaves out its newest changes, so only jobs
        that changed recently get an event posted twice.
        """
        if memory.told:
            return before
        memory.told = True
        return perhaps_untold(before, self._parts.now() - UNTOLD_TIME)

    def _tell_of_labels(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> None:
        """Post one event per pod that lost its labels; the status shows the lasting condition."""
        lost = [pod for pod in seen.pods if pod.lost_labels]
        told = tuple(unlabelled(pod) for pod in lost if pod.uid not in memory.unlabelled)
        memory.unlabelled = frozenset(pod.uid for pod in lost)
        self._parts.events.tell(Subject.of_job(job), told)

    def _tell(self, job: ElasticJob, before: Status, after: Status, applied: Applied) -> None:
        found = (*happenings(before, after, applied.actions), *undeletable(applied.kept))
        self._parts.events.tell(Subject.of_job(job), found)


def _soonest(*seconds: float | None) -> float | None:
    return min((one for one in seconds if one is not None), default=None)


def _status_patch(before: Status | None, after: Status) -> Json:
    """Return the merge patch between two statuses; empty if they are equal."""
    if before == after:
        return {}
    return merge_patch(_document(before) if before else {}, _document(after))


def _document(status: Status) -> Json:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
