"""Recorder of Kubernetes events on jobs. Best effort: nothing depends on their being posted.

A repeated event increments the count of its series. An event with an `occasion` (deduplication
key) is posted once, under a name derived from it. Each job's event rate is limited.
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
from uuid import uuid4

from elasticjob_operator.core.happenings import Happening
from elasticjob_operator.kube import EVENTS, AlreadyExists, Json, Kube, KubeError, NotFound
from elasticjob_operator.logs import of_job
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.job import API_VERSION, KIND

log = logging.getLogger(__name__)

CONTROLLER = "elasticjob.dev/operator"
LONGEST_NOTE = 1024
"""Maximum note size in bytes that the API server accepts."""
SERIES_SECONDS = 600.0
REMEMBERED = 10_000
BURST = 25
REFILL_SECONDS = 10.0
"""Token interval of the per-job rate limit; BURST is the bucket's size."""
QUEUED = 2_000


@dataclass(slots=True)
class _Series:
    name: str
    count: int
    last: float


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


@dataclass(frozen=True, slots=True)
class Subject:
    """The job that an event is about."""

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
class _Told:
    subject: Subject
    happening: Happening
    moment: datetime

    @property
    def same(self) -> tuple[str, ...]:
        """Key shared by the events of one series."""
        said = self.happening
        return self.subject.uid, said.type, said.reason, said.message

    @property
    def tail(self) -> str:
        """Suffix of the event's name: equal for equal occasions, whichever process posts it."""
        said = self.happening
        if not said.occasion:
            return uuid4().hex[:16]
        words = f"{self.subject.uid} {said.reason} {said.occasion}"
        return sha256(words.encode()).hexdigest()[:16]


class Events:
    """Background event recorder, active while `run` runs. `clock` is monotonic, `now` is UTC."""

    def __init__(
        self,
        kube: Kube,
        instance: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._clock = clock
        self._now = now
        self._queue: asyncio.Queue[_Told] = asyncio.Queue(QUEUED)
        self._series: OrderedDict[tuple[str, ...], _Series] = OrderedDict()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()

    def tell(self, subject: Subject, found: Iterable[Happening]) -> None:
        """Queue events for posting; drop those over the rate limit."""
        for said in found:
            job = f"{subject.namespace}/{subject.name}"
            log.info("%s: %s", said.reason, said.message, extra=of_job(job))
            if self._allowed(subject.uid) and not self._queue.full():
                self._queue.put_nowait(_Told(subject, said, self._now()))

    async def finish(self) -> None:
        """Wait until all queued events are posted."""
        await self._queue.join()

    async def run(self) -> None:
        """Post queued events until cancelled."""
        while True:
            told = await self._queue.get()
            try:
                await self._post(told)
            except KubeError as error:
                log.debug("cannot post an event: %s", error)
            finally:
                self._queue.task_done()

    async def _post(self, told: _Told) -> None:
        namespace, known = told.subject.namespace, self._series.get(told.same)
        if told.happening.occasion:
            with contextlib.suppress(AlreadyExists):  # already posted by another process
                await self._kube.create(EVENTS, namespace, self._event(told))
            return
        if known is not None and self._clock() - known.last < SERIES_SECONDS:
            known.count += 1
            known.last = self._clock()
            series = {"count": known.count, "lastObservedTime": _micro_time(told.moment)}
            try:
                await self._kube.patch(EVENTS, namespace, known.name, {"series": series})
            except NotFound:
                pass  # it has expired on the server: post a new one
            else:
                return
        event = self._event(told)
        await self._kube.create(EVENTS, namespace, event)
        self._series[told.same] = _Series(event["metadata"]["name"], 1, self._clock())
        self._series.move_to_end(told.same)
        if len(self._series) > REMEMBERED:
            self._series.popitem(last=False)

    def _event(self, told: _Told) -> Json:
        said = told.happening
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{told.subject.name}.{told.tail}",
                "namespace": told.subject.namespace,
            },
            "eventTime": _micro_time(told.moment),
            "type": said.type.value,
            "reason": said.reason,
            "note": _cut(said.message),
            "action": said.reason,
            "regarding": told.subject.reference,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
        }

    def _allowed(self, uid: str) -> bool:
        now = self._clock()
        allowance = self._allowances.setdefault(uid, _Allowance(BURST, now))
        self._allowances.move_to_end(uid)
        if len(self._allowances) > REMEMBERED:
            self._allowances.popitem(last=False)
        refilled = allowance.left + (now - allowance.at) / REFILL_SECONDS
        allowance.left, allowance.at = min(refilled, BURST), now
        if allowance.left < 1:
            return False
        allowance.left -= 1
        return True


def _micro_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(message: str) -> str:
    raw = message.encode(errors="replace")  # a record's text may hold lone surrogates
    if len(raw) <= LONGEST_NOTE:
        return raw.decode()
    return raw[: LONGEST_NOTE - 3].decode(errors="ignore") + "…"
