"""Creation and deletion of a job's pods, several at a time.

A creation refused by the API server does not fail the pass: it is stored as the job's refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Protocol

from elasticjob_operator.core.actions import CreatePod, DeletePod
from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.core.offenders import avoided
from elasticjob_operator.core.pod import PodSettings, TemplateRefused, pod
from elasticjob_operator.kube import (
    PODS,
    AlreadyExists,
    Invalid,
    Json,
    Kind,
    KubeError,
    NotFound,
)
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.refusals import obstacle_of
from elasticjob_operator.task import Applied, Task
from elasticjob_operator.wakeups import Retry

MOST_AT_ONCE = 16
"""Maximum concurrent creations or deletions per job. The first creation goes alone."""


class PodApi(Protocol):
    """Part of the Kubernetes client for pods. Every method may raise `KubeError`."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    async def create(
        self, kind: Kind, namespace: str | None, body: Json, *, strict: bool = False
    ) -> Json:
        """Create an object; refuse unknown fields if `strict`. Raises `AlreadyExists`."""

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str) -> bool:
        """Delete the object with this uid; return False if it is gone."""


class Pods:
    """Writer of pods for `apply.Applier`. `now` is UTC."""

    def __init__(
        self,
        kube: PodApi,
        settings: PodSettings,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._metrics = metrics
        self._now = now

    async def create(self, task: Task, creations: list[CreatePod], applied: Applied) -> None:
        """Create one pod, then many at a time: a refusal usually applies to all of them."""
        if not task.source.usable:
            applied.refused = True
            return  # the refusal already has the reason
        if not task.sight.incarnation_known:
            raise Retry("cannot create pods: etcd is unreadable and the incarnation unknown")
        at_once = 1
        while creations:
            batch, creations = creations[:at_once], creations[at_once:]
            made = len(applied.created)
            await _all([self._create_one(task, one, applied) for one in batch])
            if len(applied.created) - made < len(batch):
                applied.refused = True
                return
            at_once = MOST_AT_ONCE
        applied.refusal = None

    async def _create_one(self, task: Task, action: CreatePod, applied: Applied) -> None:
        """Create a pod; store a refusal."""
        namespace, access = task.job.metadata.namespace, task.memory.owned.access
        assert access is not None
        try:
            avoid = avoided(task.job.status, self._now())
            body = pod(task.job, action.index, action.incarnation, self._settings, access, avoid)
            # Strict: otherwise the API server silently drops a misspelt field of the template.
            raw = await self._kube.create(PODS, namespace, body, strict=True)
        except AlreadyExists:
            await self._find_holder(task, action, applied)
        except TemplateRefused as error:
            applied.refuse(Obstacle.TEMPLATE_INVALID, str(error), self._now())
        except KubeError as error:
            template = isinstance(error, Invalid)
            obstacle = Obstacle.TEMPLATE_INVALID if template else obstacle_of(error)
            if obstacle is None:
                raise
            applied.refuse(obstacle, error.message, self._now())
        else:
            applied.actions.append(action)
            applied.created.append(raw)
            self._metrics.pods_created.inc()

    async def _find_holder(self, task: Task, action: CreatePod, applied: Applied) -> None:
        """Find the owner of the pod with this name; the next pass skips a foreign pod's index."""
        try:
            raw = await self._kube.get(PODS, task.job.metadata.namespace, action.name)
        except NotFound as error:
            # Retry: without the label, its deletion caused no wake-up.
            raise Retry(f"pod {action.name} existed and was deleted since") from error
        if is_owned(task.job, raw):
            # Created by an earlier request without a response, or its label was removed.
            applied.unlisted.add(action.name)
            raise Retry(f"pod {action.name} exists but was not listed")
        applied.foreign.add(action.index)

    async def delete(self, task: Task, deletions: list[DeletePod], applied: Applied) -> None:
        """Delete pods, several at a time; the uid protects a successor of the same name."""
        for first in range(0, len(deletions), MOST_AT_ONCE):
            batch = deletions[first : first + MOST_AT_ONCE]
            await _all([self._delete_one(task, one, applied) for one in batch])

    async def _delete_one(self, task: Task, action: DeletePod, applied: Applied) -> None:
        namespace = task.job.metadata.namespace
        try:
            deleted = await self._kube.delete(PODS, namespace, action.name, uid=action.uid)
        except KubeError as error:
            if obstacle_of(error) is not None:
                applied.kept[action.name] = error.message
            raise
        applied.deleted.add(action.uid)
        if deleted:
            applied.actions.append(action)
            self._metrics.pods_deleted.labels(action.reason.value).inc()


async def _all(calls: list[Coroutine[None, None, None]]) -> None:
    """Run all calls concurrently to their end, then raise the first error."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
