"""Cluster behind an API server: the pods of a plan, and the objects that they need.

Pods are created and deleted several at a time. A refused pod creation does not fail the pass:
it is stored as the job's refusal, and the remaining actions follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import UID_LABEL
from elasticjob_operator.domain.manifests.owned_objects import is_of_predecessor, is_owned
from elasticjob_operator.domain.manifests.pod import PodSettings, TemplateRefused, pod
from elasticjob_operator.domain.observed.pod_identity import is_own
from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.domain.plan.actions import CreatePod, DeletePod
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.domain.status.failures import avoided_names
from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    PODS,
    AlreadyExists,
    Json,
    Kind,
    KubeError,
    NotFound,
)
from elasticjob_operator.logs import of_job
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import (
    Applied,
    NameTaken,
    ReconcileContext,
)
from elasticjob_operator.reconcile.job_memory import JobMemory, Withdrawals
from elasticjob_operator.reconcile.owned_objects import NotServed
from elasticjob_operator.reconcile.refusals import obstacle_of, refusal_of_pod
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.sources import RendezvousSource

log = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 16
"""Maximum concurrent creations or deletions per job. The first creation goes alone."""
PODS_SECONDS = 5.0
"""Time after which no further pods of a plan are created or deleted: the status is written, other
jobs get their turn, and the next reconcile continues. If the first creation takes longer, the time
begins with its end."""


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


class PlanApi(PodApi, Protocol):
    """Part of the Kubernetes client for the objects that plans change."""

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Merge `body` into an object. Raises `KubeError`."""


class ObjectKeeper(Protocol):
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
        """Ensure Service, NetworkPolicy and Secret are current. Raises `NameTaken`."""

    async def ensure_budget(self, job: ElasticJob, memory: JobMemory, ready: int) -> None:
        """Create or update the budget. Raises `NameTaken`."""


class KubeCluster:
    """Cluster behind the API server of `kube`. `now` is UTC, `clock` monotonic."""

    def __init__(
        self,
        kube: PlanApi,
        owned_objects: ObjectKeeper,
        settings: PodSettings,
        metrics: Metrics,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._kube = kube
        self._owned_objects = owned_objects
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._clock = clock

    async def update_owned(
        self, context: ReconcileContext, planned: Plan, applied: Applied
    ) -> None:
        try:
            await self._prepare(context, planned, needed=False)
        except (NameTaken, NotServed) as error:
            obstacle = obstacle_of(error)
            assert obstacle is not None
            applied.refuse(obstacle, str(error), self._now())
            raise

    async def _prepare(self, context: ReconcileContext, planned: Plan, needed: bool) -> None:
        """Ensure the objects pods need before creation and while running. Raises `NameTaken`."""
        if planned.bounds is None or not context.source.usable:
            return
        renew = context.source.has_lost(context.observation.observed)
        await self._owned_objects.ensure(
            context.job, context.memory, context.source, needed=needed, renew=renew
        )
        await self._owned_objects.ensure_budget(context.job, context.memory, context.ready)

    async def create_pods(
        self, context: ReconcileContext, planned: Plan, creations: list[CreatePod], applied: Applied
    ) -> None:
        """Create one pod, then many at a time: a refusal usually applies to all of them."""
        try:
            await self._prepare(context, planned, needed=True)
        except (NameTaken, KubeError) as error:
            obstacle = obstacle_of(error)
            if obstacle is None:
                raise
            applied.refuse(obstacle, str(error), self._now())
            applied.refused = True
            return
        if not context.source.usable:
            applied.refused = True
            return  # the refusal already has the reason
        if not context.observation.incarnation_known:
            raise Retry("cannot create pods: etcd is unreadable and the incarnation unknown")
        if await self._is_withdrawn(context, applied):
            return
        at_once, began = 1, self._clock()
        while creations:
            if self._clock() - began > PODS_SECONDS:
                applied.unfinished = True
                break
            batch, creations = creations[:at_once], creations[at_once:]
            made = len(applied.created)
            await _all([self._create_one(context, item, applied) for item in batch])
            if len(applied.created) - made < len(batch):
                applied.refused = True
                return
            if at_once == 1:  # however slow it was: otherwise each reconcile would create one pod
                at_once, began = MAX_CONCURRENT_CALLS, self._clock()
        applied.refusal = None

    async def _is_withdrawn(self, context: ReconcileContext, applied: Applied) -> bool:
        """Refuse further pods for a while after one was withdrawn, and while it exists: otherwise
        each reconcile would create pods that nobody owns."""
        memory = context.memory
        known = memory.withdrawn
        if not known.message:
            return False
        left = {uid: name for uid, name in known.pods.items() if await self._is_left(context, uid)}
        memory.withdrawn = replace(known, pods=left)
        if not left and self._clock() >= known.until:
            return False
        applied.refuse(Obstacle.OWNER_REMOVED, known.message, self._now())
        applied.refused = True
        return True

    async def _is_left(self, context: ReconcileContext, uid: str) -> bool:
        """Return True if the withdrawn pod still exists; delete it again if the deletion failed."""
        namespace, name = context.job.metadata.namespace, context.memory.withdrawn.pods[uid]
        try:
            metadata = (await self._kube.get(PODS, namespace, name))["metadata"]
        except NotFound:
            return False
        if metadata["uid"] == uid and "deletionTimestamp" not in metadata:
            await self._delete_withdrawn(context, name, uid)
        return bool(metadata["uid"] == uid)

    async def _withdraw(self, context: ReconcileContext, raw: Json, applied: Applied) -> None:
        """Delete a pod whose owner references were removed at its creation: it would outlive the
        job."""
        memory, metadata = context.memory, raw["metadata"]
        name, uid = metadata["name"], metadata["uid"]
        text = (
            f"an admission webhook or policy removes metadata.ownerReferences from {name}, which "
            "would outlive the job and is deleted; exclude pods with the label "
            f"{UID_LABEL} from it"
        )
        memory.withdrawn = memory.withdrawn.after(uid, name, text, self._clock())
        applied.refuse(Obstacle.OWNER_REMOVED, text, self._now())
        await self._delete_withdrawn(context, name, uid)

    async def _delete_withdrawn(self, context: ReconcileContext, name: str, uid: str) -> None:
        """Delete a pod; a refusal must not delay other actions, and the next pass tries again."""
        try:
            await self._kube.delete(PODS, context.job.metadata.namespace, name, uid=uid)
        except KubeError as error:
            if obstacle_of(error) is None:
                raise
            log.warning("pod without owner: %s", error, extra=of_job(context.memory.key))

    async def _create_one(
        self, context: ReconcileContext, action: CreatePod, applied: Applied
    ) -> None:
        """Create a pod; store a refusal."""
        namespace, access = context.job.metadata.namespace, context.memory.owned.access
        assert access is not None
        body: Json = {}
        try:
            pods = context.observation.observed.pods
            avoid = avoided_names(context.job.status, self._now(), pods)
            body = pod(context.job, action.index, action.incarnation, self._settings, access, avoid)
            # Strict: otherwise the API server silently drops a misspelt field of the template.
            raw = await self._kube.create(PODS, namespace, body, strict=True)
        except AlreadyExists:
            await self._find_holder(context, action, applied)
        except TemplateRefused as error:
            applied.refuse(Obstacle.TEMPLATE_INVALID, str(error), self._now())
        except KubeError as error:
            obstacle, message = refusal_of_pod(error, body)
            if obstacle is None:
                raise
            applied.refuse(obstacle, message, self._now())
        else:
            if UID_LABEL not in (raw["metadata"].get("labels") or {}):
                applied.unlisted.add(action.name)  # admission removed it: no LIST will show the pod
            if not is_owned(context.job, raw):
                await self._withdraw(context, raw, applied)
                return
            if not context.memory.withdrawn.pods:  # the next pass deletes those that are left
                context.memory.withdrawn = Withdrawals()
            applied.actions.append(action)
            applied.created.append(raw)
            self._metrics.pods_created.inc()

    async def _find_holder(
        self, context: ReconcileContext, action: CreatePod, applied: Applied
    ) -> None:
        """Find the owner of the pod with this name; the next pass skips a foreign pod's index."""
        try:
            raw = await self._kube.get(PODS, context.job.metadata.namespace, action.name)
        except NotFound as error:
            # Retry: without the label, its deletion caused no wake-up.
            raise Retry(f"pod {action.name} existed and was deleted since") from error
        if raw["metadata"].get("uid") in context.memory.withdrawn.pods:
            raise Retry(f"pod {action.name} was withdrawn and is not gone yet")
        if is_own(context.job, raw):
            # Created by an earlier request without a response, or its label was removed.
            applied.unlisted.add(action.name)
            raise Retry(f"pod {action.name} exists but was not listed")
        applied.foreign.add(action.index)
        if is_of_predecessor(context.job, raw):
            applied.predecessors.add(action.index)

    async def delete_pods(
        self, context: ReconcileContext, deletions: list[DeletePod], applied: Applied
    ) -> None:
        """Delete pods, many at a time. A refusal of some, as of those that a webhook protects, is
        raised after the deletion of the others; the next plan deletes them last."""
        began, refused, memory = self._clock(), None, context.memory
        deletions = sorted(deletions, key=lambda one: one.uid in memory.undeletable)
        for first in range(0, len(deletions), MAX_CONCURRENT_CALLS):
            if self._clock() - began > PODS_SECONDS:
                applied.unfinished = True
                break
            batch = deletions[first : first + MAX_CONCURRENT_CALLS]
            try:
                await _all([self._delete_one(context, item, applied) for item in batch])
            except KubeError as error:
                if obstacle_of(error) is None:
                    raise
                refused = refused or error
        if refused is not None:
            raise refused

    async def _delete_one(
        self, context: ReconcileContext, action: DeletePod, applied: Applied
    ) -> None:
        namespace = context.job.metadata.namespace
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

    async def write_nodes(self, job: ElasticJob, nodes: int) -> None:
        """Write spec.nodes; the operator then owns it in metadata.managedFields.

        The API server records no owner if the scale subresource writes a field that was absent.
        """
        metadata = job.metadata
        preconditions = {"uid": metadata.uid, "resourceVersion": metadata.resource_version}
        await self._kube.patch(
            ELASTICJOBS,
            metadata.namespace,
            metadata.name,
            {"metadata": preconditions, "spec": {"nodes": nodes}},
        )

    async def delete_job(self, job: ElasticJob) -> None:
        metadata = job.metadata
        await self._kube.delete(ELASTICJOBS, metadata.namespace, metadata.name, uid=metadata.uid)


async def _all(calls: list[Coroutine[None, None, None]]) -> None:
    """Run all calls concurrently to their end, then raise the first error.

    A single call runs in the reconcile's own task, whose processor time is limited.
    """
    if len(calls) == 1:
        await calls[0]
        return
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
