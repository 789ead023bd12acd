"""Guard around the reconcile of each job, so that no object can stop the service of the others.

A reconcile is bounded in time. A job whose reconciles end with an unexpected error, or exceed a
bound, several times in a row is set aside: a condition and an event report it, and nothing more
happens until its generation changes. A new process tries once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

from elasticjob_operator.domain.json_object import merge_patch
from elasticjob_operator.domain.status.events import set_aside_event
from elasticjob_operator.domain.status.set_aside import (
    SetAside,
    SetAsideReason,
    is_set_aside,
    set_aside_status,
)
from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    Conflict,
    Invalid,
    Json,
    NotFound,
    TooManyObjects,
)
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.logs import of_job
from elasticjob_operator.reconcile.job_memory import Faults, JobKey, JobMemory, Jobs
from elasticjob_operator.reconcile.plan_pass import EXPECTED
from elasticjob_operator.reconcile.processor_time import ProcessorTime, TooLong
from elasticjob_operator.reconcile.status_writer import EventSink, JobApi, StatusWriter
from elasticjob_operator.reconcile.workqueue import Retry

log = logging.getLogger(__name__)

NOW_SECONDS = 0.0
RECONCILE_SECONDS = 240.0
"""Default maximum duration of a reconcile; it is then retried. Below the duration after which the
process counts as stuck."""
MAX_FAULTS = 5
"""Number of unexpected errors in a row after which a job is set aside."""
MAX_EXCESSES = 2
"""Number of reconciles in a row that needed too much memory after which a job is set aside."""


class FaultGuard:
    """Guard of all jobs. `now` is UTC; `reconcile_seconds` limits the duration of a reconcile."""

    def __init__(
        self,
        kube: JobApi,
        jobs: Jobs,
        events: EventSink,
        writer: StatusWriter,
        now: Callable[[], datetime],
        processor_time: ProcessorTime,
        reconcile_seconds: float = RECONCILE_SECONDS,
    ) -> None:
        self._kube = kube
        self._jobs = jobs
        self._events = events
        self._writer = writer
        self._now = now
        self._processor_time = processor_time
        self._reconcile_seconds = reconcile_seconds

    async def run(self, key: JobKey, work: Coroutine[Any, Any, float | None]) -> float | None:
        """Run a reconcile within bounds; return its result.

        Raises:
            Retry: the reconcile took too long.
            Exception: an error of the reconcile, unless the job is set aside for it.
        """
        limit = asyncio.timeout(self._reconcile_seconds)
        try:
            async with limit:
                seconds = await self._processor_time.limit(work)
        except (Retry, *EXPECTED):
            raise
        except Exception as error:  # a job's top-level task: its fault must not affect other jobs
            if limit.expired():
                message = f"the reconcile took longer than {self._reconcile_seconds:g} s"
                raise Retry(message) from error
            return await self._after(key, error)
        memory = self._jobs.find(key)
        if memory is not None and memory.faults.aside is None:
            memory.faults = Faults()
        return seconds

    async def _after(self, key: JobKey, error: Exception) -> float | None:
        """Raise the error again, or set the job aside if there were too many in a row."""
        try:
            raw = await self._kube.get(ELASTICJOBS, key.namespace, key.name)
        except NotFound:
            return NOW_SECONDS  # the next reconcile drops the job
        memory = self._jobs.recall(key, raw["metadata"]["uid"])
        memory.faults = memory.faults.after_another(_generation(raw))
        if memory.faults.count < _most_faults(raw, error):
            raise error
        aside = _set_aside(error)
        log.error("set aside: %s", aside.text, exc_info=error, extra=of_job(key))
        return await self.set_aside(memory, raw, aside)

    async def set_aside(self, memory: JobMemory, raw: Json, aside: SetAside) -> float | None:
        """Set a job aside; return the seconds until the next reconcile. Raises `KubeError`."""
        memory.faults = Faults(_generation(raw), aside=aside)
        self._events.record(Subject.of(raw), (set_aside_event(aside),))
        return await self.keep_aside(memory, raw, aside)

    def aside(self, memory: JobMemory, raw: Json) -> SetAside | None:
        """Return the decision for a job that is set aside at its present generation, or None."""
        faults = memory.faults
        return faults.aside if faults.generation == _generation(raw) else None

    async def keep_aside(self, memory: JobMemory, raw: Json, aside: SetAside) -> float | None:
        """Write the status of a job that is set aside, unless it is there; as `set_aside`."""
        stored = raw.get("status") or {}
        before = self._writer.sent(memory, raw) or stored
        status = set_aside_status({**raw, "status": before}, aside, self._now())
        patch = merge_patch(stored, status)
        if not patch:
            self._writer.forget(memory)
            return None
        if status == before and not self._writer.is_due(memory):
            return None
        try:
            await self._writer.write(memory, raw, patch, status)
        except (Conflict, NotFound):
            return NOW_SECONDS
        except Invalid as error:
            # Kubernetes 1.29 also checks the stored spec, against the present schema.
            log.warning("cannot write the status: %s", error, extra=of_job(memory.key))
        return None


def _generation(raw: Json) -> int:
    found: int = raw["metadata"].get("generation", 0)
    return found


def _most_faults(raw: Json, error: Exception) -> int:
    """Return the number of such errors in a row after which the job is set aside."""
    # An earlier process may have set the job aside. A second reconcile that blocks the event loop
    # may cost the process its Lease.
    if is_set_aside(raw) or isinstance(error, TooLong):
        return 1
    return MAX_EXCESSES if isinstance(error, MemoryError | TooManyObjects) else MAX_FAULTS


def _set_aside(error: Exception) -> SetAside:
    """Return the decision to set a job aside after this error."""
    match error:
        case TooLong():
            return SetAside(SetAsideReason.RECONCILE_TOO_LONG, str(error))
        case TooManyObjects():
            return SetAside(SetAsideReason.RECONCILE_TOO_LARGE, str(error))
        case MemoryError():
            message = "the operator's memory did not suffice for the reconcile"
            return SetAside(SetAsideReason.RECONCILE_TOO_LARGE, message)
    message = (
        "its reconcile fails with an error of the operator, whose log has the traceback: "
        f"{type(error).__name__}: {error}"
    )
    return SetAside(SetAsideReason.RECONCILE_FAILED, message)
