"""Recorder of Kubernetes events on jobs. Best effort: nothing depends on their being posted.

A repeated event increments the count of its series. An event with a deduplication key is
posted once, under a name derived from the key. Each job's event rate is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Protocol
from uuid import uuid4

from elasticjob_operator.domain.status.events import Event
from elasticjob_operator.kubernetes.client import (
    EVENTS,
    AlreadyExists,
    Json,
    Kind,
    KubeError,
    NotFound,
)
from elasticjob_operator.logs import of_job
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.job import API_VERSION, KIND
from elasticjob_rendezvous.protocol.text import printable
from elasticjob_rendezvous.token_bucket import TokenBucket

log = logging.getLogger(__name__)

CONTROLLER = "elasticjob.dev/operator"
LONGEST_NOTE = 1024
"""Maximum note size in bytes that the API server accepts."""
SERIES_SECONDS = 600.0
MAX_SERIES = 10_000
BURST = 25
REFILL_SECONDS = 10.0
"""Token interval of the per-job rate limit; BURST is the bucket's size."""
MAX_QUEUED = 2_000


@dataclass(slots=True)
class _Series:
    name: str
    count: int
    last: float


@dataclass(frozen=True, slots=True)
class Subject:
    """Job that an event is about."""

    namespace: str
    name: str
    uid: str
    resource_version: str

    @classmethod
    def of(cls, raw: Json) -> Subject:
        metadata = raw["metadata"]
        return cls(
            metadata["namespace"], metadata["name"], metadata["uid"], metadata["resourceVersion"]
        )

    @classmethod
    def of_job(cls, job: ElasticJob) -> Subject:
        metadata = job.metadata
        return cls(metadata.namespace, metadata.name, metadata.uid, metadata.resource_version)

    @property
    def reference(self) -> Json:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
            "resourceVersion": self.resource_version,
        }


@dataclass(frozen=True, slots=True)
class _QueuedEvent:
    subject: Subject
    event: Event
    moment: datetime

    @property
    def series_key(self) -> tuple[str, ...]:
        """Key shared by the events of one series."""
        event = self.event
        return self.subject.uid, event.type, event.reason, event.message

    @property
    def name_suffix(self) -> str:
        """Suffix of the event's name: equal for equal keys, in every process."""
        event = self.event
        if not event.deduplication_key:
            return uuid4().hex[:16]
        words = f"{self.subject.uid} {event.reason} {event.deduplication_key}"
        return sha256(words.encode()).hexdigest()[:16]


class EventApi(Protocol):
    """Part of the Kubernetes client for events."""

    async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
        """Create an object. Raises `AlreadyExists` or another `KubeError`."""

    async def patch(self, kind: Kind, namespace: str | None, name: str, body: Json) -> Json:
        """Merge `body` into an object. Raises `NotFound` or another `KubeError`."""


class EventRecorder:
    """Background event recorder, active while `run` runs. `clock` is monotonic, `now` is UTC."""

    def __init__(
        self,
        kube: EventApi,
        instance: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._clock = clock
        self._now = now
        self._queue: asyncio.Queue[_QueuedEvent] = asyncio.Queue(MAX_QUEUED)
        self._series: OrderedDict[tuple[str, ...], _Series] = OrderedDict()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def record(self, subject: Subject, found: Iterable[Event]) -> None:
        """Queue events for posting; drop those over the rate limit."""
        for event in found:
            job = f"{subject.namespace}/{subject.name}"
            log.info("%s: %s", event.reason, event.message, extra=of_job(job))
            if self._allowed(subject.uid) and not self._queue.full():
                self._queue.put_nowait(_QueuedEvent(subject, event, self._now()))

    async def finish(self) -> None:
        """Wait until all queued events are posted."""
        await self._queue.join()

    async def run(self) -> None:
        """Post queued events until cancelled."""
        while True:
            queued = await self._queue.get()
            try:
                await self._post(queued)
            except KubeError as error:
                log.debug("cannot post an event: %s", error)
            finally:
                self._queue.task_done()

    async def _post(self, queued: _QueuedEvent) -> None:
        namespace, known = queued.subject.namespace, self._series.get(queued.series_key)
        if queued.event.deduplication_key:
            with contextlib.suppress(AlreadyExists):  # already posted by another process
                await self._kube.create(EVENTS, namespace, self._event(queued))
            return
        if known is not None and self._clock() - known.last < SERIES_SECONDS:
            known.count += 1
            known.last = self._clock()
            series = {"count": known.count, "lastObservedTime": _micro_time(queued.moment)}
            try:
                await self._kube.patch(EVENTS, namespace, known.name, {"series": series})
            except NotFound:
                pass  # it has expired on the server: post a new one
            else:
                return
        event = self._event(queued)
        await self._kube.create(EVENTS, namespace, event)
        self._series[queued.series_key] = _Series(event["metadata"]["name"], 1, self._clock())
        self._series.move_to_end(queued.series_key)
        if len(self._series) > MAX_SERIES:
            self._series.popitem(last=False)

    def _event(self, queued: _QueuedEvent) -> Json:
        event = queued.event
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{queued.subject.name}.{queued.name_suffix}",
                "namespace": queued.subject.namespace,
            },
            "eventTime": _micro_time(queued.moment),
            "type": event.type.value,
            "reason": event.reason,
            "note": _truncated(printable(event.message)),
            "action": event.reason,
            "regarding": queued.subject.reference,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
        }

    def _allowed(self, uid: str) -> bool:
        bucket = self._buckets.setdefault(uid, TokenBucket(BURST, REFILL_SECONDS))
        self._buckets.move_to_end(uid)
        if len(self._buckets) > MAX_SERIES:
            self._buckets.popitem(last=False)
        return bucket.take(self._clock())


def _micro_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _truncated(message: str) -> str:
    raw = message.encode(errors="replace")  # a record's text may hold lone surrogates
    if len(raw) <= LONGEST_NOTE:
        return raw.decode()
    return raw[: LONGEST_NOTE - 3].decode(errors="ignore") + "…"
