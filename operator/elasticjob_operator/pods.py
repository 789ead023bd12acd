"""Creates and deletes a job's pods, several at once.

A pod that the API server refuses is no failure of the pass: it is remembered as the job's refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime

from elasticjob_operator.core.actions import CreatePod, DeletePod
from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.core.offenders import avoided
from elasticjob_operator.core.pod import PodSettings, TemplateRefused, pod
from elasticjob_operator.kube import (
    PODS,
    AlreadyExists,
    Invalid,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.refusals import obstacle_of
from elasticjob_operator.task import Applied, Task
from elasticjob_operator.wakeups import Retry

MOST_AT_ONCE = 16
"""Pods of one job created or deleted at the same time. The first creation goes alone."""


class Pods:
    """The pods of all jobs, as `apply.Applier` changes them. `now` is UTC."""

    def __init__(
        self,
        kube: Kube,
        settings: PodSettings,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._metrics = metrics
        self._now = now

    async def create(self, task: Task, creations: list[CreatePod], applied: Applied) -> None:
        """One first, then many at once: what is refused is mostly refused for all."""
        if task.etcd is None:
            applied.refused = True
            return  # the refusal says why
        if not task.sight.incarnation_known:
            raise Retry("etcd cannot be read, so it is not known which pods to make")
        at_once = 1
        while creations:
            batch, creations = creations[:at_once], creations[at_once:]
            made = len(applied.created)
            await _all([self._create_one(task, one, applied) for one in batch])
            if len(applied.created) - made < len(batch):
                applied.refused = True
                return
            at_once = MOST_AT_ONCE
        task.memory.refusal = None

    async def _create_one(self, task: Task, action: CreatePod, applied: Applied) -> None:
        """Create a pod; a refusal is remembered."""
        namespace, memory = task.job.metadata.namespace, task.memory
        assert memory.access is not None
        try:
            avoid = avoided(task.job.status, self._now())
            body = pod(
                task.job, action.index, action.incarnation, self._settings, memory.access, avoid
            )
            # Strict: the API server would drop a misspelt field of the template without a word.
            raw = await self._kube.create(PODS, namespace, body, strict=True)
        except AlreadyExists:
            await self._find_holder(task, action)
        except TemplateRefused as error:
            memory.refuse(Obstacle.TEMPLATE_INVALID, str(error), self._now())
        except KubeError as error:
            template = isinstance(error, Invalid)
            obstacle = Obstacle.TEMPLATE_INVALID if template else obstacle_of(error)
            if obstacle is None:
                raise
            memory.refuse(obstacle, error.message, self._now())
        else:
            applied.actions.append(action)
            applied.created.append(raw)
            self._metrics.pods_created.inc()

    async def _find_holder(self, task: Task, action: CreatePod) -> None:
        """Whose pod has the name? A stranger's is passed by at the next look."""
        try:
            raw = await self._kube.get(PODS, task.job.metadata.namespace, action.name)
        except NotFound as error:
            # One without our label wakes nobody when it goes.
            raise Retry(f"pod {action.name} was there a moment ago") from error
        if is_owned(task.job, raw):
            # Made by a request of ours that got no answer, or its label was taken off.
            task.memory.unlisted.add(action.name)
            raise Retry(f"pod {action.name} is there, but was not listed")
        task.memory.foreign.add(action.index)

    async def delete(self, task: Task, deletions: list[DeletePod], applied: Applied) -> None:
        """Several at once. They were listed in this pass; the uid keeps a successor safe."""
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
    """Run them at once, all to their end; raises what went wrong first."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
