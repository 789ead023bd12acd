"""Writer of the status of jobs.

An API server whose CRD is older than the operator drops the fields that its schema lacks. The
status is then not written again as long as the object has the stored part of it: the operator
continues from the status that it sent. The log and an event name such fields, each once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from hashlib import sha256
from typing import Protocol

from elasticjob_operator.domain.json_object import dropped_fields
from elasticjob_operator.domain.status.events import Event, fields_dropped
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.kubernetes.kinds import ELASTICJOBS, Json, Kind
from elasticjob_operator.logs import of_job
from elasticjob_operator.reconcile.job_memory import JobMemory, SentStatus

log = logging.getLogger(__name__)


class JobApi(Protocol):
    """Part of the Kubernetes client for jobs and their status."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Apply a merge patch; return the object. Raises `KubeError`."""


class EventSink(Protocol):
    """Recorder of Kubernetes events."""

    def record(self, subject: Subject, found: Iterable[Event]) -> None:
        """Post these events, asynchronously."""


class StatusWriter:
    """Writer of statuses to one API server."""

    def __init__(self, kube: JobApi, events: EventSink) -> None:
        self._kube = kube
        self._events = events
        self._dropped: set[str] = set()

    def sent(self, memory: JobMemory, raw: Json) -> Json | None:
        """Return the status that this process wrote last, if the object has the stored part of it;
        None if it has all of it, or another status."""
        sent = memory.sent
        known = sent is not None and sent.stored == _digest(raw.get("status"))
        return sent.document if sent is not None and known else None

    def forget(self, memory: JobMemory) -> None:
        """Drop the status that was written last: the object has all of another one."""
        memory.sent = None

    async def write(self, memory: JobMemory, raw: Json, patch: Json, status: Json) -> Json:
        """Write the patch to `status`, the complete new one; return the object.

        Raises:
            KubeError: it was not written, or there was no answer.
        """
        metadata = raw["metadata"]
        preconditions = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        body = {"metadata": preconditions, "status": patch}
        key = memory.key
        written = await self._kube.patch(
            ELASTICJOBS, key.namespace, key.name, body, subresource="status"
        )
        self._compare(memory, raw, status, written)
        return written

    def _compare(self, memory: JobMemory, raw: Json, status: Json, written: Json) -> None:
        """Keep the status if the API server has dropped fields of it."""
        stored = written.get("status")
        dropped = set(dropped_fields(status, stored)) if isinstance(stored, dict) else set()
        sent = SentStatus(_digest(stored), status) if dropped else None
        memory.sent = sent
        if new := sorted(dropped - self._dropped):
            self._dropped.update(new)
            event = fields_dropped(new)
            log.warning("%s", event.message, extra=of_job(memory.key))
            self._events.record(Subject.of(raw), (event,))


def _digest(status: object) -> str:
    return sha256(json.dumps(status, sort_keys=True).encode()).hexdigest()
