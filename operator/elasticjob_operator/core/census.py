"""Census of a job's pods: those that hold an index, count towards the size, or can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from elasticjob_operator.core.observed import NodeState, Observed, Pod, PodPhase
from elasticjob_operator.model.job import ElasticJob


@dataclass(frozen=True, slots=True)
class Census:
    """Pods of a job, grouped by their effect on its size; each group in order of index.

    Args:
        counted: pods that make up the size.
        given_up: pods of `counted` whose launcher has not started in pendingTimeoutSeconds.
        marked: pods that are to leave: marked in bounds, or terminating and not yet ended.
        failed: pods that ended in failure and are not terminating.
        indices: indices held by any pod of the job or by a foreign pod; not free yet.
    """

    counted: tuple[Pod, ...]
    given_up: tuple[Pod, ...]
    marked: tuple[Pod, ...]
    failed: tuple[Pod, ...]
    indices: frozenset[int]

    def free_indices(self) -> Iterator[int]:
        """Yield the indices that no pod holds, lowest first."""
        index = 0
        while True:
            if index not in self.indices:
                yield index
            index += 1


def take_census(job: ElasticJob, observed: Observed, now: datetime) -> Census:
    """Return the census of the job's pods at `now` (UTC)."""
    pods = sorted(observed.pods, key=lambda pod: (pod.index, pod.uid))
    told = {mark.member for mark in observed.bounds.marks} if observed.bounds else set()
    counted = tuple(pod for pod in pods if pod.uid not in told and _counts(pod))
    return Census(
        counted=counted,
        given_up=tuple(pod for pod in counted if _given_up(job, pod, now)),
        # An ended pod is no longer a member: it needs no drain mark.
        marked=tuple(pod for pod in pods if pod.uid in told or (pod.terminating and not pod.ended)),
        failed=tuple(pod for pod in pods if pod.phase is PodPhase.FAILED and not pod.terminating),
        indices=observed.foreign | {pod.index for pod in pods},
    )


def gives_up_at(job: ElasticJob, pod: Pod) -> datetime | None:
    """Return the time at which the job stops waiting for this pod; None while its launcher runs
    or once the pod succeeded."""
    if pod.launcher_since is not None or pod.phase is PodPhase.SUCCEEDED:
        return None
    return pod.created_at + timedelta(seconds=job.spec.elasticity.pending_timeout_seconds)


def _counts(pod: Pod) -> bool:
    lost = pod.phase is PodPhase.FAILED or pod.node_state is NodeState.NOT_READY
    return not pod.terminating and not lost


def _given_up(job: ElasticJob, pod: Pod, now: datetime) -> bool:
    due = gives_up_at(job, pod)
    return due is not None and due <= now
