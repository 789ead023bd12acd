"""Rendezvous backend of a job: the parameters its agents get, and the host of a c10d store.

With etcd v3 the operator steers the rendezvous: it writes the `bounds` record with sizes,
timeouts and drain requests, and the outcome. The torch backends (etcd-v2, c10d) accept nothing
from an operator: their agents get all settings at their start, and everything else follows
from creating and deleting pods.

One pod at a time hosts the store of a c10d job, always with the same name, by which other pods
find it. It cannot be created while its predecessor's object exists, so one place in the job is
reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elasticjob_operator.domain.manifests.names import pod_name, service_name
from elasticjob_operator.domain.observed.state import NodeState, Observed, Obstacle, Pod
from elasticjob_operator.domain.plan.actions import DeletePod, DeleteReason
from elasticjob_operator.domain.plan.lifecycle import grace_seconds
from elasticjob_operator.domain.plan.sizes import CountedPods, wanted_size
from elasticjob_operator.model.job import Elasticity, ElasticJob
from elasticjob_operator.model.types import Backend, ScaleUp
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams

TERMINATING = "Terminating"
"""Reason in the drain request of a pod that was not deleted by the operator."""


def rendezvous_params(
    job: ElasticJob, wanted: int, expected: int, requests: Iterable[DrainRequest] = ()
) -> RendezvousParams:
    """Return the `bounds` for a job of the `wanted` size, of which `expected` nodes can join.

    The wanted size is the members' maximum: a round never exceeds the size the user asks for.
    """
    spec = job.spec
    return RendezvousParams(
        min_nodes=spec.min_nodes,
        max_nodes=wanted,
        increment=spec.node_increment,
        expected=expected,
        max_restarts=spec.max_restarts,
        join_timeout_seconds=float(spec.rendezvous.join_timeout_seconds),
        last_call_seconds=float(spec.rendezvous.last_call_seconds),
        keep_alive_seconds=float(spec.rendezvous.keep_alive_seconds),
        confirm_seconds=float(spec.rendezvous.confirm_seconds),
        settle_seconds=float(spec.elasticity.settle_seconds),
        stop_grace_seconds=float(spec.recovery.stop_grace_seconds),
        scale_up_wait_seconds=_scale_up_wait_seconds(spec.elasticity),
        leave_seconds=float(grace_seconds(job)),
        ceiling_nodes=spec.max_nodes,
        marks=tuple(sorted(requests, key=lambda drain_request: drain_request.member)),
    )


def _scale_up_wait_seconds(elasticity: Elasticity) -> float:
    waits = elasticity.scale_up is ScaleUp.AFTER_CHECKPOINT
    return float(elasticity.scale_up_max_wait_seconds) if waits else 0.0


def drain_requests(
    observed: Observed, marked: Iterable[Pod], victims: Iterable[tuple[Pod, DeleteReason]]
) -> list[DrainRequest]:
    """Return the drain requests of all pods that are to leave; an existing one keeps its reason.

    Only the reason `Terminating` is replaced, once the pod shows a disruption by the cluster.
    """
    before = (
        {drain_request.member: drain_request for drain_request in observed.bounds.marks}
        if observed.bounds
        else {}
    )
    found = []
    for pod in marked:
        drain_request = before.get(pod.uid) or DrainRequest(pod.uid, TERMINATING)
        if pod.disruption and drain_request.reason == TERMINATING:
            drain_request = DrainRequest(pod.uid, pod.disruption, preempted=True)
        found.append(drain_request)
    return [*found, *(DrainRequest(pod.uid, reason.value) for pod, reason in victims)]


STORE_INDEX = 0
"""Index of the pod that hosts the store of a c10d job. A pod's name is unique and is free only
once its predecessor's object is gone, so no second store can split the job."""
STORE_PORT = 29400
"""Default c10d port of torch, so that a torchrun outside of the job needs no port."""


def is_steered(job: ElasticJob) -> bool:
    """Return True if the operator steers the rendezvous: bounds, drain requests and outcome."""
    return job.spec.rendezvous.backend is Backend.ETCD


def keeps_store(job: ElasticJob, index: int) -> bool:
    """Return True if the pod with this index hosts the c10d store of the job."""
    rendezvous = job.spec.rendezvous
    return rendezvous.backend is Backend.C10D and not rendezvous.endpoints and index == STORE_INDEX


def endpoints_of(job: ElasticJob, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rendezvous endpoints of the agents; `default` is the operator's etcd."""
    rendezvous = job.spec.rendezvous
    if rendezvous.endpoints:
        return tuple(rendezvous.endpoints)
    return (_store_endpoint(job),) if rendezvous.backend is Backend.C10D else default


def agent_params(job: ElasticJob) -> RendezvousParams:
    """Return the bounds that agents of torch backends get in their environment.

    They must be the same in every pod of the job, or its members would disagree. The number of
    pods enforces the wanted size; the current one only gives the first round the number of nodes to
    wait for.
    """
    return rendezvous_params(job, job.spec.max_nodes, wanted_size(job).nodes)


def _store_endpoint(job: ElasticJob) -> str:
    host = f"{pod_name(job.metadata.name, STORE_INDEX)}.{service_name(job)}"
    return f"{host}.{job.metadata.namespace}.svc:{STORE_PORT}"


def pods_with_store_host(job: ElasticJob, counted_pods: CountedPods, missing: int) -> int:
    """Return the number of pods to create so that the store's pod is, or can later be, among them.

    If all places are taken, it is created in addition, which makes another pod surplus.
    """
    if not keeps_store(job, STORE_INDEX) or _store_host(counted_pods) is not None:
        return missing
    return missing - 1 if STORE_INDEX in counted_pods.indices else max(missing, 1)


def stale_store_host(job: ElasticJob, counted_pods: CountedPods) -> list[DeletePod]:
    """Return the deletion of a failed store pod, whose name is needed at once."""
    if not keeps_store(job, STORE_INDEX):
        return []
    return [
        DeletePod(pod.name, pod.uid, DeleteReason.REPLACED)
        for pod in counted_pods.failed
        if pod.index == STORE_INDEX
    ]


class StoreObstacle(StrEnum):
    """Reason for which no pod hosts the store, besides the `Obstacle` of its pod."""

    PREDECESSOR = "PredecessorTerminating"  # a deleted job's pod of its name is still there
    NAME_TAKEN = "NameTaken"  # a pod of another owner has its name
    NODE_NOT_READY = "NodeNotReady"
    TERMINATING = "Terminating"  # the former pod is being deleted
    ENDED = "Ended"  # the former pod has ended and is replaced


@dataclass(frozen=True, slots=True)
class StoreAbsence:
    """Absence of the pod that hosts the store.

    Args:
        pod: name of the pod.
        reason: a `StoreObstacle`, or the obstacle to creating or running the pod.
        message: text of the scheduler, the kubelet or the API server on it; may be empty.
        node: machine of the former pod, if that is not ready.
    """

    pod: str
    reason: StoreObstacle | Obstacle
    message: str = ""
    node: str | None = None


def store_absence(
    job: ElasticJob, observed: Observed, counted: Iterable[Pod]
) -> StoreAbsence | None:
    """Return the absence of the store's pod; None if it runs, starts or is about to be created."""
    if not keeps_store(job, STORE_INDEX):
        return None
    name = pod_name(job.metadata.name, STORE_INDEX)
    for pod in counted:
        if pod.index == STORE_INDEX:
            if pod.obstacle is None or pod.ready:
                return None
            return StoreAbsence(name, pod.obstacle, pod.obstacle_message)
    if STORE_INDEX in observed.predecessors:
        return StoreAbsence(name, StoreObstacle.PREDECESSOR)
    if STORE_INDEX in observed.foreign:
        return StoreAbsence(name, StoreObstacle.NAME_TAKEN)
    for pod in observed.pods:
        if pod.index == STORE_INDEX:
            if pod.node_state is NodeState.NOT_READY:
                return StoreAbsence(name, StoreObstacle.NODE_NOT_READY, node=pod.node)
            reason = StoreObstacle.TERMINATING if pod.terminating else StoreObstacle.ENDED
            return StoreAbsence(name, reason, pod.end_message)
    if observed.refusal is None:
        return None
    return StoreAbsence(name, observed.refusal.obstacle, observed.refusal.message)


def _store_host(counted_pods: CountedPods) -> Pod | None:
    return next((pod for pod in counted_pods.counted if pod.index == STORE_INDEX), None)
