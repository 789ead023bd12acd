"""Plan type, and the plans of ending and finished jobs. For all others see `core.plan`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from elasticjob_operator.core.actions import Action, CloseRendezvous, DeleteJob, DeletePod
from elasticjob_operator.core.backends import is_steered
from elasticjob_operator.core.lifecycle import cleanup_at, expires_at, failed_by_deadline
from elasticjob_operator.core.observed import Observed, Pod
from elasticjob_operator.core.rendezvous_view import StopReason
from elasticjob_operator.core.sizes import WantedSize, wanted_size
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_operator.model.enums import CleanPodPolicy, Phase
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.records import OutcomeKind

_REASONS = {
    StopReason.SUSPENDED: DeleteReason.SUSPENDED,
    StopReason.DEADLINE_EXCEEDED: DeleteReason.DEADLINE_EXCEEDED,
    StopReason.DELETED: DeleteReason.JOB_DELETED,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions that are due now, and the time of the next reconcile.

    Args:
        actions: actions, in order of execution.
        phase: current phase of the job.
        size: wanted size.
        bounds: bounds for the members; None while no member may join.
        wake_at: time at which the plan changes without any event; None for never.
    """

    actions: tuple[Action, ...]
    phase: Phase
    size: WantedSize
    bounds: Bounds | None = None
    wake_at: datetime | None = None

    @property
    def expected(self) -> int | None:
        """Number of members that can join; None while no member may join."""
        return self.bounds.expected if self.bounds else None


def ending(job: ElasticJob, observed: Observed, phase: Phase, reason: StopReason) -> Plan:
    """Return the plan that closes the rendezvous, then deletes the pods.

    In this order a leaving member starts no round. The pods are deleted even if the rendezvous is
    unreadable: no member remains that could disagree.
    """
    view = observed.rendezvous
    actions: list[Action] = []
    entered = is_steered(job) and observed.bounds is not None
    if entered and view.readable and view.outcome is None:
        actions.append(CloseRendezvous(observed.incarnation, OutcomeKind.STOPPED, reason))
    everything = reason is not StopReason.DEADLINE_EXCEEDED
    actions += [
        DeletePod(pod.name, pod.uid, _REASONS[reason])
        for pod in in_order(observed)
        if pod.active or (everything and not pod.terminating)
    ]
    return Plan(tuple(actions), phase, wanted_size(job.spec))


def finished(job: ElasticJob, observed: Observed, phase: Phase, now: datetime) -> Plan:
    """Return the plan of a finished job: cleanPodPolicy after a grace period for the agents' own
    end, then ttlSecondsAfterFinished."""
    size = wanted_size(job.spec)
    expiry, cleanup = expires_at(job), cleanup_at(job)
    if expiry is not None and expiry <= now:
        return Plan((DeleteJob(),), phase, size)
    if failed_by_deadline(job):
        close = ending(job, observed, phase, StopReason.DEADLINE_EXCEEDED)
        if close.actions:
            return close
    policy = job.spec.run_policy.clean_pod_policy
    doomed = [
        pod
        for pod in in_order(observed)
        if (policy is CleanPodPolicy.RUNNING and (pod.active or _lingers(pod)))
        or (policy is CleanPodPolicy.ALL and not pod.terminating)
    ]
    if not doomed:
        return Plan((), phase, size, None, expiry)
    if cleanup is None or cleanup > now:
        # Delete not even a pod that seems never to have run: its observed state may be older than
        # the job's end, and its logs would be lost.
        return Plan((), phase, size, None, earliest(expiry, cleanup))
    actions = tuple(DeletePod(pod.name, pod.uid, DeleteReason.JOB_FINISHED) for pod in doomed)
    return Plan(actions, phase, size, None, expiry)


def _lingers(pod: Pod) -> bool:
    """Return True if other containers outlive the trainer and the pod is not being deleted."""
    return pod.lingering and not pod.terminating


def earliest(*moments: datetime | None) -> datetime | None:
    return min((moment for moment in moments if moment is not None), default=None)


def in_order(observed: Observed) -> list[Pod]:
    return sorted(observed.pods, key=lambda pod: (pod.index, pod.uid))
