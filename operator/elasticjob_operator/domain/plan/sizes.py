"""Sizes of a job: wanted nodes, counted pods, disruption budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from elasticjob_operator.domain.observed.state import (
    NodeState,
    Observed,
    Pod,
    PodPhase,
)
from elasticjob_operator.model.job import ElasticJob, ElasticJobSpec


class Clamp(StrEnum):
    """Reason for which the wanted size differs from spec.nodes. Printed as a condition's reason."""

    BELOW_MIN_NODES = "BelowMinNodes"
    ABOVE_MAX_NODES = "AboveMaxNodes"
    BETWEEN_INCREMENTS = "BetweenIncrements"


@dataclass(frozen=True, slots=True)
class WantedSize:
    """Wanted size: `requested` is spec.nodes (maxNodes if it was never set), `nodes` the legal
    size."""

    nodes: int
    requested: int
    clamp: Clamp | None = None


def legal_sizes(spec: ElasticJobSpec) -> range:
    """Return the sizes minNodes + k * nodeIncrement, up to maxNodes."""
    return range(spec.min_nodes, spec.max_nodes + 1, spec.node_increment)


def wanted_size(job: ElasticJob) -> WantedSize:
    """Return the largest legal size that does not exceed spec.nodes, but at least minNodes.

    A value of spec.nodes that the operator wrote stands for maxNodes.
    """
    spec, follows = job.spec, job.follows_max_nodes
    sizes = legal_sizes(spec)
    requested = spec.max_nodes if follows or spec.nodes is None else spec.nodes
    if requested < spec.min_nodes:
        return WantedSize(spec.min_nodes, requested, Clamp.BELOW_MIN_NODES)
    largest = sizes[(min(requested, spec.max_nodes) - spec.min_nodes) // spec.node_increment]
    if largest == requested or follows:
        return WantedSize(largest, requested)
    clamp = Clamp.ABOVE_MAX_NODES if requested > spec.max_nodes else Clamp.BETWEEN_INCREMENTS
    return WantedSize(largest, requested, clamp)


@dataclass(frozen=True, slots=True)
class CountedPods:
    """Pods of a job, grouped by their effect on its size; each group in order of index.

    Args:
        counted: pods that make up the size.
        given_up: pods of `counted` whose launcher has not started in pendingTimeoutSeconds and that
            their machine does not prepare.
        marked: pods that are to leave: marked in bounds, or terminating and not yet ended.
        failed: pods that ended in failure and are not terminating.
        stuck: active pods whose workers the kernel does not end.
        indices: indices held by any pod of the job or by a foreign pod; not free yet.
    """

    counted: tuple[Pod, ...]
    given_up: tuple[Pod, ...]
    marked: tuple[Pod, ...]
    failed: tuple[Pod, ...]
    stuck: tuple[Pod, ...]
    indices: frozenset[int]

    def free_indices(self) -> Iterator[int]:
        """Yield the indices that no pod holds, lowest first."""
        index = 0
        while True:
            if index not in self.indices:
                yield index
            index += 1


def count_pods(job: ElasticJob, observed: Observed, now: datetime) -> CountedPods:
    """Return the counted pods of the job at `now` (UTC)."""
    pods = sorted(observed.pods, key=lambda pod: (pod.index, pod.uid))
    drained = (
        {drain_request.member for drain_request in observed.bounds.marks}
        if observed.bounds
        else set()
    )
    counted = tuple(pod for pod in pods if pod.uid not in drained and _is_counted(pod))
    return CountedPods(
        counted=counted,
        given_up=tuple(pod for pod in counted if _is_given_up(job, pod, now)),
        # An ended pod is no longer a member: it needs no drain request.
        marked=tuple(
            pod for pod in pods if pod.uid in drained or (pod.terminating and not pod.ended)
        ),
        failed=tuple(pod for pod in pods if pod.phase is PodPhase.FAILED and not pod.terminating),
        stuck=tuple(pod for pod in pods if pod.stuck and pod.active),
        indices=observed.foreign | {pod.index for pod in pods},
    )


def gives_up_at(job: ElasticJob, pod: Pod) -> datetime | None:
    """Return the time at which the job stops waiting for this pod; None while its launcher runs
    or its machine prepares it, and once the pod succeeded."""
    if pod.launcher_since is not None or pod.preparing or pod.phase is PodPhase.SUCCEEDED:
        return None
    return pod.created_at + timedelta(seconds=job.spec.elasticity.pending_timeout_seconds)


def _is_counted(pod: Pod) -> bool:
    lost = pod.phase is PodPhase.FAILED or pod.node_state is NodeState.NOT_READY
    return not (pod.terminating or lost or pod.stuck)


def _is_given_up(job: ElasticJob, pod: Pod, now: datetime) -> bool:
    due = gives_up_at(job, pod)
    return due is not None and due <= now


def min_available(job: ElasticJob, ready: int) -> int | None:
    """Return `minAvailable` of the job's PodDisruptionBudget; None if it is switched off.

    With minNodes or fewer Ready, one pod may still be evicted, and the job waits for its
    replacement. Otherwise a job that cannot get all its nodes would block every drain.
    """
    if not job.spec.elasticity.disruption_budget:
        return None
    least = job.spec.min_nodes
    return least if ready > least else least - 1
