"""`bounds` record of a job: the sizes and timeouts of its rendezvous."""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.core.grace import grace_seconds
from elasticjob_operator.core.observed import Observed, Pod
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_operator.model.enums import ScaleUp
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.spec import Elasticity
from elasticjob_rendezvous.core.bounds import Bounds, Mark

TERMINATING = "Terminating"
"""Reason in the drain mark of a pod that was not deleted by the operator."""


def bounds_of(job: ElasticJob, wanted: int, expected: int, marks: Iterable[Mark] = ()) -> Bounds:
    """Return the `bounds` for a job of the `wanted` size, of which `expected` nodes can join.

    The wanted size is the members' maximum: a round never exceeds the size the user asks for.
    """
    spec = job.spec
    return Bounds(
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
        marks=tuple(sorted(marks, key=lambda mark: mark.member)),
    )


def _scale_up_wait_seconds(elasticity: Elasticity) -> float:
    waits = elasticity.scale_up is ScaleUp.AFTER_CHECKPOINT
    return float(elasticity.scale_up_max_wait_seconds) if waits else 0.0


def marks(
    observed: Observed, marked: Iterable[Pod], victims: Iterable[tuple[Pod, DeleteReason]]
) -> list[Mark]:
    """Return the drain marks of all pods that are to leave; an existing mark keeps its reason.

    Only the reason `Terminating` is replaced, once the pod shows a disruption by the cluster.
    """
    before = {mark.member: mark for mark in observed.bounds.marks} if observed.bounds else {}
    found = []
    for pod in marked:
        mark = before.get(pod.uid) or Mark(pod.uid, TERMINATING)
        if pod.disruption and mark.reason == TERMINATING:
            mark = Mark(pod.uid, pod.disruption, preempted=True)
        found.append(mark)
    return [*found, *(Mark(pod.uid, reason.value) for pod, reason in victims)]
