"""Carries out a plan: its actions in order, up to the first that fails.

A pod that the API server refuses is no failure of the pass: it is remembered as the job's refusal,
and what else is to be done is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import assert_never

from elasticjob_operator.agent_status import Agents
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
from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.core.offenders import avoided
from elasticjob_operator.core.pod import PodSettings, TemplateRefused, pod
from elasticjob_operator.dependents import Dependents, NameTaken
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import JobMemory
from elasticjob_operator.kube import (
    ELASTICJOBS,
    PODS,
    AlreadyExists,
    Invalid,
    Json,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.mirror import Contended, close, remove_members, write_bounds
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.observe import Sight
from elasticjob_operator.refusals import obstacle_of
from elasticjob_operator.wakeups import Retry
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind
from elasticjob_rendezvous.etcd.errors import EtcdError

SEEN_SECONDS = 2.0
"""How long a write may take to show in the mirror before the status is computed without it."""
MOST_AT_ONCE = 16
"""Pods of one job created or deleted at the same time. The first creation goes alone."""

EXPECTED = (KubeError, EtcdError, Contended, NameTaken, Retry)
"""What may go wrong with a pass without being a fault of this program."""


@dataclass(slots=True)
class Applied:
    """What came of a plan: what was done, and what went wrong first.

    Args:
        kept: pods that the API server refuses to delete, and its words.
    """

    actions: list[Action] = field(default_factory=list)
    created: list[Json] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    error: Exception | None = None
    refused: bool = False
    kept: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """A plan and whose it is. `etcd` is None while the job's may not be used."""

    job: ElasticJob
    memory: JobMemory
    etcd: Etcd | Agents | None
    sight: Sight

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.sight.observed.pods)

    @property
    def lost(self) -> bool:
        """Whether etcd lost the job's records, and with them its user."""
        observed = self.sight.observed
        if not isinstance(self.etcd, Etcd):
            return False
        return bool(observed.pods) and observed.rendezvous.readable and observed.bounds is None

    def prefix(self, incarnation: int) -> str:
        return job_prefix(self.job.metadata.namespace, self.job.metadata.uid, incarnation)

    def usable_etcd(self) -> Etcd:
        """For actions that a plan holds only while the rendezvous is readable."""
        if not isinstance(self.etcd, Etcd):
            raise Retry("the job's etcd may not be used")
        return self.etcd


class Applier:
    """Applies plans."""

    def __init__(
        self,
        kube: Kube,
        dependents: Dependents,
        settings: PodSettings,
        metrics: Metrics,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._dependents = dependents
        self._settings = settings
        self._metrics = metrics
        self._now = now

    async def apply(self, task: Task, planned: Plan) -> Applied:
        """Do what is planned. What is expected to go wrong is in the result, never raised."""
        applied = Applied()
        creates = any(isinstance(action, CreatePod) for action in planned.actions)
        if not creates and task.etcd is not None:
            task.memory.refusal = None  # nothing is refused that nobody asks for
        try:
            for kind, group in groupby(planned.actions, key=type):
                await self._apply_alike(task, planned, kind, list(group), applied)
            if not creates:
                await self._prepare(task, planned, needed=False)
        except NameTaken as error:
            task.memory.refuse(Obstacle.NAME_CONFLICT, str(error), self._now())
            applied.error = error
        except EXPECTED as error:
            applied.error = error
        return applied

    async def _apply_alike(
        self, task: Task, planned: Plan, kind: type, actions: list[Action], applied: Applied
    ) -> None:
        """Actions of one kind that follow each other: those on pods go several at once."""
        if kind is CreatePod:
            creations = [one for one in actions if isinstance(one, CreatePod)]
            try:
                await self._prepare(task, planned, needed=True)
            except (NameTaken, KubeError) as error:
                obstacle = obstacle_of(error)
                if obstacle is None:
                    raise
                task.memory.refuse(obstacle, str(error), self._now())
                applied.refused = True
            else:
                await self._create(task, creations, applied)
        elif kind is DeletePod:
            deletions = [one for one in actions if isinstance(one, DeletePod)]
            await self._delete(task, deletions, applied)
        else:
            for action in actions:
                await self._do(task, action)
                applied.actions.append(action)

    async def _prepare(self, task: Task, planned: Plan, needed: bool) -> None:
        """What pods need before they are made, and while they run. Raises `NameTaken`."""
        if planned.bounds is None or task.etcd is None:
            return
        await self._dependents.ensure(
            task.job, task.memory, task.etcd, needed=needed, renew=task.lost
        )
        await self._dependents.ensure_budget(task.job, task.memory, task.ready)

    async def _do(self, task: Task, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                await self._write_nodes(task.job, nodes)
            case WriteBounds(incarnation, bounds):
                etcd = task.usable_etcd()
                revision = await write_bounds(etcd.client, task.prefix(incarnation), bounds)
                task.memory.incarnation, task.memory.bounds = incarnation, bounds
                await etcd.mirror.reached(revision, SEEN_SECONDS)
            case CloseRendezvous(incarnation, kind):
                outcome = Outcome(OutcomeKind(kind.value), action.detail)
                etcd, now_ms = task.usable_etcd(), int(self._now().timestamp() * 1000)
                closed = await close(etcd.client, task.prefix(incarnation), outcome, now_ms)
                if closed is not None:
                    await etcd.mirror.reached(closed, SEEN_SECONDS)
            case RemoveMembers(incarnation, members):
                etcd = task.usable_etcd()
                revision = await remove_members(etcd.client, task.prefix(incarnation), members)
                # Else a look in between would remove, and tell of, them once more.
                await etcd.mirror.reached(revision, SEEN_SECONDS)
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

    # -- pods

    async def _create(self, task: Task, creations: list[CreatePod], applied: Applied) -> None:
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

    async def _delete(self, task: Task, deletions: list[DeletePod], applied: Applied) -> None:
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
