"""Applier of plans: performs the actions in order, up to the first failure.

A refused pod creation does not fail the pass: it is stored as the job's refusal, and the remaining
actions follow.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import groupby
from typing import Protocol, assert_never

from elasticjob_operator.core.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteBounds,
    WriteNodes,
)
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.core.pod import PodSettings
from elasticjob_operator.dependents import NameTaken
from elasticjob_operator.jobs import JobMemory
from elasticjob_operator.kube import (
    ELASTICJOBS,
    Json,
    Kind,
    KubeError,
)
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.mirror import Contended
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.pods import PodApi, Pods
from elasticjob_operator.refusals import obstacle_of
from elasticjob_operator.sources import RendezvousSource
from elasticjob_operator.task import Applied, Task
from elasticjob_operator.wakeups import Retry
from elasticjob_rendezvous.etcd.errors import EtcdError

EXPECTED = (KubeError, EtcdError, Contended, NameTaken, Retry)
"""Errors of a pass that are not bugs in this program."""


class PlanApi(PodApi, Protocol):
    """Part of the Kubernetes client for the objects that plans change."""

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Merge `body` into an object. Raises `KubeError`."""


class OwnedObjects(Protocol):
    """Manager of the objects that a job's pods need."""

    async def ensure(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        *,
        needed: bool,
        renew: bool,
    ) -> None:
        """Ensure Service and Secret exist and are current. Raises `NameTaken`."""

    async def ensure_budget(self, job: ElasticJob, memory: JobMemory, ready: int) -> None:
        """Create or update the budget. Raises `NameTaken`."""


class Applier:
    """Applier of plans to the API server and etcd."""

    def __init__(
        self,
        kube: PlanApi,
        dependents: OwnedObjects,
        settings: PodSettings,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._dependents = dependents
        self._pods = Pods(kube, settings, metrics, now)
        self._now = now

    async def apply(self, task: Task, planned: Plan) -> Applied:
        """Apply the plan. Return `EXPECTED` errors in the result instead of raising them."""
        applied = Applied(refusal=task.memory.refusal)
        creates = any(isinstance(action, CreatePod) for action in planned.actions)
        if not creates and task.source.usable:
            applied.refusal = None  # it concerned pods that are no longer wanted
        try:
            for kind, group in groupby(planned.actions, key=type):
                await self._apply_alike(task, planned, kind, list(group), applied)
            if not creates:
                await self._prepare(task, planned, needed=False)
        except NameTaken as error:
            applied.refuse(Obstacle.NAME_CONFLICT, str(error), self._now())
            applied.error = error
        except EXPECTED as error:
            applied.error = error
        return applied

    async def _apply_alike(
        self, task: Task, planned: Plan, kind: type, actions: list[Action], applied: Applied
    ) -> None:
        """Apply consecutive actions of one kind; those on pods run several at a time."""
        if kind is CreatePod:
            creations = [one for one in actions if isinstance(one, CreatePod)]
            try:
                await self._prepare(task, planned, needed=True)
            except (NameTaken, KubeError) as error:
                obstacle = obstacle_of(error)
                if obstacle is None:
                    raise
                applied.refuse(obstacle, str(error), self._now())
                applied.refused = True
            else:
                await self._pods.create(task, creations, applied)
        elif kind is DeletePod:
            deletions = [one for one in actions if isinstance(one, DeletePod)]
            await self._pods.delete(task, deletions, applied)
        else:
            for action in actions:
                await self._do(task, action)
                applied.actions.append(action)

    async def _prepare(self, task: Task, planned: Plan, needed: bool) -> None:
        """Ensure the objects pods need before creation and while running. Raises `NameTaken`."""
        if planned.bounds is None or not task.source.usable:
            return
        renew = task.source.has_lost(task.sight.observed)
        await self._dependents.ensure(
            task.job, task.memory, task.source, needed=needed, renew=renew
        )
        await self._dependents.ensure_budget(task.job, task.memory, task.ready)

    async def _do(self, task: Task, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                await self._write_nodes(task.job, nodes)
            case WriteBounds(incarnation, bounds):
                await task.source.write_bounds(task.memory, incarnation, bounds)
            case CloseRendezvous(incarnation):
                now_ms = int(self._now().timestamp() * 1000)
                await task.source.close(incarnation, action.outcome, now_ms)
            case RemoveMembers(incarnation, members):
                await task.source.remove_members(incarnation, members)
            case DeleteJob():
                metadata = task.job.metadata
                await self._kube.delete(
                    ELASTICJOBS, metadata.namespace, metadata.name, uid=metadata.uid
                )
            case CreatePod() | DeletePod():
                raise AssertionError(f"{action} is applied with its like")
            case _:
                assert_never(action)

    async def _write_nodes(self, job: ElasticJob, nodes: int) -> None:
        metadata = job.metadata
        preconditions = {"uid": metadata.uid, "resourceVersion": metadata.resource_version}
        await self._kube.patch(
            ELASTICJOBS,
            metadata.namespace,
            metadata.name,
            {"metadata": preconditions, "spec": {"replicas": nodes}},
            subresource="scale",
        )
