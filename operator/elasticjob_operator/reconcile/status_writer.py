"""Writer of the status of jobs.

An API server whose CRD is older than the operator drops the fields that its schema lacks, and
refuses a status with a value that it lacks, which is then written without that value. The
status is then not written again as long as the object has the stored part of it: the operator
continues from the status that it sent. It sends it again from time to time, which completes it once
the CRD was upgraded. The log and an event name such fields, each once.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Protocol

from elasticjob_operator.domain.json_object import dropped_fields, is_part
from elasticjob_operator.domain.status.events import Event, fields_dropped
from elasticjob_operator.kubernetes.errors import Cause, Invalid, Unreachable
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.kubernetes.kinds import ELASTICJOBS, Json, Kind
from elasticjob_operator.logs import of_job
from elasticjob_operator.reconcile.job_memory import JobMemory, SentStatus

log = logging.getLogger(__name__)

RESEND_SECONDS = 300.0
"""Age at which the next reconcile sends a status again of which fields were dropped; half of the
interval at which an unchanged job is reconciled."""


class JobApi(Protocol):
    """Part of the Kubernetes client for jobs and their status."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Apply a merge patch; return the object. Raises `KubeError`."""

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str) -> bool:
        """Delete the object with this uid; return False if it is gone. Raises `KubeError`."""


class EventSink(Protocol):
    """Recorder of Kubernetes events."""

    def record(self, subject: Subject, found: Iterable[Event]) -> None:
        """Post these events, asynchronously."""


class StatusWriter:
    """Writer of statuses to one API server. `clock` is monotonic."""

    def __init__(self, kube: JobApi, events: EventSink, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._events = events
        self._clock = clock
        self._dropped: set[str] = set()

    def sent(self, memory: JobMemory, raw: Json) -> Json | None:
        """Return the status that this process wrote last, if the object has the stored part of it;
        None if it has all of it, or another status.

        A status whose write had no answer was written if the object has a part of it.
        """
        sent, stored = memory.sent, raw.get("status")
        if sent is None:
            return None
        if sent.stored == (digest := _digest(stored)):
            return sent.content()
        # The digest shows that the object has changed: perhaps by a write without an answer.
        status: Json | None = json.loads(sent.unconfirmed) if sent.unconfirmed is not None else None
        if status is None or not stored or not is_part(stored, status):
            return None
        memory.sent = SentStatus.of(digest, status, sent.sent_at)
        return status

    def forget(self, memory: JobMemory) -> None:
        """Drop the status that was sent: the object has all of it."""
        memory.sent = None

    def is_due(self, memory: JobMemory) -> bool:
        """Return True if a status with dropped fields is to be sent again, although unchanged."""
        sent = memory.sent
        return sent is not None and self._clock() - sent.sent_at >= RESEND_SECONDS

    async def write(self, memory: JobMemory, raw: Json, patch: Json, status: Json) -> Json:
        """Write the patch to `status`, the complete new one; return the object.

        Raises:
            KubeError: it was not written, or there was no answer.
        """
        metadata = raw["metadata"]
        preconditions = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        body = {"metadata": preconditions, "status": patch}
        refused: list[str] = []
        try:
            try:
                written = await self._patch(memory, body)
            except Invalid as error:
                patch, refused = _without_unsupported(patch, error.causes)
                if not refused:
                    raise
                written = await self._patch(memory, {**body, "status": patch})
        except Unreachable:
            if (sent := memory.sent) is not None:
                memory.sent = sent.without_answer(status)
            raise
        self._compare(memory, raw, patch, status, written, refused)
        return written

    async def _patch(self, memory: JobMemory, body: Json) -> Json:
        key = memory.key
        return await self._kube.patch(
            ELASTICJOBS, key.namespace, key.name, body, subresource="status"
        )

    def _compare(
        self,
        memory: JobMemory,
        raw: Json,
        patch: Json,
        status: Json,
        written: Json,
        refused: list[str],
    ) -> None:
        """Keep the status if the API server has dropped fields of the patch, or refused values.

        A dropped field is in every patch, unless it has its default; the status also has fields
        that were not sent, because the stored one lacks them and they have their defaults.
        """
        stored = written.get("status")
        dropped = set(dropped_fields(patch, stored)) if isinstance(stored, dict) else set()
        dropped.update(refused)
        memory.sent = SentStatus.of(_digest(stored), status, self._clock()) if dropped else None
        if new := sorted(dropped - self._dropped):
            self._dropped.update(new)
            event = fields_dropped(new)
            log.warning("%s", event.message, extra=of_job(memory.key))
            self._events.record(Subject.of(raw), (event,))


_UNSUPPORTED = "FieldValueNotSupported"
"""Reason of a cause of an error: a value that the schema does not list."""
_CONDITION_TYPE = re.compile(r"status\.conditions\[(\d+)\]\.type")


def _without_unsupported(patch: Json, causes: Iterable[Cause]) -> tuple[Json, list[str]]:
    """Return the patch without the values that the CRD lacks, and their paths, such as
    `phase=Deleting`.

    Of the conditions only those of unknown types are left out, of other lists and objects all.
    """
    paths = [cause.field for cause in causes if cause.reason == _UNSUPPORTED]
    kept, refused = dict(patch), list[str]()
    conditions = patch.get("conditions") or []
    unknown = {int(found[1]) for path in paths if (found := _CONDITION_TYPE.fullmatch(path))}
    if unknown := {index for index in unknown if index < len(conditions)}:
        kept["conditions"] = [one for at, one in enumerate(conditions) if at not in unknown]
        refused += [f"conditions.{conditions[at]['type']}" for at in sorted(unknown)]
    for path in paths:
        name = re.split(r"[.\[]", path.removeprefix("status."))[0]
        if not _CONDITION_TYPE.fullmatch(path) and name in kept:
            value = kept.pop(name)
            refused.append(f"{name}={value}" if isinstance(value, str) else name)
    return kept, refused


def _digest(status: object) -> str:
    return sha256(json.dumps(status, sort_keys=True).encode()).hexdigest()
