"""Phases of a job and their transitions, deadlines and grace periods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from elasticjob_operator.domain.observed.state import (
    NodeState,
    Observed,
    Pod,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.closing_checkpoint import OPEN, StoreAccess, is_saving
from elasticjob_operator.enums import FINISHED as FINISHED
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.types import (
    Backend,
    ConditionStatus,
    ConditionType,
    Phase,
    RendezvousState,
)
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

DEFAULT_SECONDS = 30
MARGIN_SECONDS = 20
"""Time to leave beyond the workers' own grace period, in seconds: the end of a checkpoint, etcd,
the stop of the containers."""


def grace_seconds(job: ElasticJob) -> int:
    """Return the pod's grace period in seconds: the template's, or else enough to stop workers."""
    given = job.spec.template.spec.termination_grace_period_seconds
    if given is not None:
        return given
    return max(DEFAULT_SECONDS, job.spec.recovery.stop_grace_seconds + MARGIN_SECONDS)


def with_own_grace(job: ElasticJob, bounds: RendezvousParams | None) -> RendezvousParams | None:
    """Return the observed bounds with the job's own leave time: its etcd user may write any."""
    return None if bounds is None else replace(bounds, leave_seconds=float(grace_seconds(job)))


def shutdown_time(job: ElasticJob) -> timedelta:
    """Return the maximum time agents need, once the job has ended, to stop workers and exit."""
    spec = job.spec
    return timedelta(seconds=spec.recovery.stop_grace_seconds + spec.rendezvous.confirm_seconds)


SUSPENSION = frozenset({Phase.SUSPENDING, Phase.SUSPENDED})
STOPPING = SUSPENSION | FINISHED | {Phase.DELETING}
"""Phases of a job without pods, or whose pods are to end."""

NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.RUNNING, Phase.RESTARTING}) | STOPPING,
    Phase.RUNNING: frozenset({Phase.RESTARTING}) | STOPPING,
    Phase.RESTARTING: frozenset({Phase.RUNNING}) | STOPPING,
    Phase.SUSPENDING: frozenset({Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDED})
    | FINISHED
    | {Phase.DELETING},
    Phase.SUSPENDED: frozenset({Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDING})
    | FINISHED
    | {Phase.DELETING},
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.DELETING: FINISHED,
    Phase.INTERRUPTED: frozenset(set(Phase) - {Phase.INTERRUPTED}),
}
"""Legal phase transitions. Some skip a phase, because a pass may miss intermediate states."""


def may_write(pod: Pod) -> bool:
    """Return True if the pod's workers may still write a checkpoint.

    On an unreachable machine they have stopped, since their leases have expired, and stuck ones run
    no more. Neither do ended pods count whose object only a finalizer keeps.
    """
    if pod.stuck or pod.node_state is NodeState.NOT_READY:
        return False
    return not (pod.over and pod.terminating)


def next_phase(
    job: ElasticJob,
    view: RendezvousView,
    now: datetime,
    pods: Sequence[Pod] = (),
    bounds: RendezvousParams | None = None,
    access: StoreAccess = OPEN,
) -> Phase:
    """Return the phase of the job, which has these pods: the one in its status or a legal
    successor.

    A job that saves before its suspension, its deletion or after its deadline still runs.
    """
    current = job.status.phase or Phase.PENDING
    if current is Phase.INTERRUPTED:  # started again
        current = Phase.PENDING
    if current in FINISHED:
        return current
    deleted = job.metadata.deletion_timestamp is not None
    if view.outcome is not None and view.ended:
        if deleted and view.outcome.reason == StopReason.DELETED:
            return Phase.DELETING
        return Phase.SUCCEEDED if view.outcome.kind is OutcomeKind.SUCCEEDED else Phase.FAILED
    stopped = current in SUSPENSION or current is Phase.DELETING
    saves = not stopped and is_saving(view, with_own_grace(job, bounds), now, access)
    if (deleted or current is Phase.DELETING) and not saves:
        return Phase.DELETING
    if job.spec.run_policy.suspend and not saves:
        return Phase.SUSPENDING if pods else Phase.SUSPENDED
    polled = job.spec.rendezvous.backend is not Backend.ETCD
    if (polled and current is Phase.SUSPENDING) or lacks_record(job, view, pods, bounds):
        # Only the status records this suspension: it must be complete before the job resumes.
        return Phase.SUSPENDING if any(may_write(pod) for pod in pods) else Phase.SUSPENDED
    if deadline_exceeded(job, now) and not saves:
        return Phase.FAILED
    return _forming_or_running(current, view)


def lacks_record(
    job: ElasticJob,
    view: RendezvousView,
    pods: Sequence[Pod],
    bounds: RendezvousParams | None,
) -> bool:
    """Return True if all pods were stopped by a suspension of which etcd may have no record.

    etcd refused the write, or cannot be read. The next incarnation begins once the suspension is
    recorded; in the current one the stopped pods would count as lost. An incarnation that had no
    round continues, so it needs no record.
    """
    known = job.status.rendezvous
    trained = view.round > 0 and bounds is not None
    if not view.readable:
        trained = known is not None and known.round > 0
    return (
        job.status.phase in SUSPENSION
        and job.spec.rendezvous.backend is Backend.ETCD
        and view.outcome is None
        and trained
        and not any(pod.active for pod in pods)
    )


def awaits_resumption(job: ElasticJob, phase: Phase | None) -> bool:
    """Return True if the job is to be resumed and its last suspension is not complete."""
    return phase in SUSPENSION and not job.spec.run_policy.suspend


def _forming_or_running(current: Phase, view: RendezvousView) -> Phase:
    if not view.readable:
        return Phase.PENDING if current in SUSPENSION else current
    if view.state is RendezvousState.FINAL:
        return Phase.RUNNING
    if current in (Phase.RUNNING, Phase.RESTARTING):
        return Phase.RESTARTING
    # Training before a suspension does not turn the resumption into a restart.
    ran = any(found.nodes for found in view.rounds) and not view.suspended
    return Phase.RESTARTING if ran else Phase.PENDING


def deadline(job: ElasticJob) -> datetime | None:
    """Return the time of activeDeadlineSeconds; None without a deadline or before the start."""
    seconds, start = job.spec.run_policy.active_deadline_seconds, job.status.start_time
    if seconds is None or start is None:
        return None
    return start + timedelta(seconds=seconds)


def deadline_exceeded(job: ElasticJob, now: datetime) -> bool:
    """Return True if the job is past its deadline and not suspended."""
    due = deadline(job)
    return due is not None and due <= now and not job.spec.run_policy.suspend


def stop_reason(job: ElasticJob, now: datetime) -> StopReason | None:
    """Return the reason for which an unfinished job is to be stopped as a whole; None if it is
    not."""
    if job.metadata.deletion_timestamp is not None:
        return StopReason.DELETED
    if job.spec.run_policy.suspend:
        return StopReason.SUSPENDED
    return StopReason.DEADLINE_EXCEEDED if deadline_exceeded(job, now) else None


def failed_by_deadline(job: ElasticJob) -> bool:
    """Return True if the status shows that the job failed by its deadline."""
    return any(
        condition.type is ConditionType.FAILED
        and condition.status is ConditionStatus.TRUE
        and condition.reason == StopReason.DEADLINE_EXCEEDED
        for condition in job.status.conditions
    )


def suspended_at(job: ElasticJob) -> datetime | None:
    """Return the time since which the status shows the job as suspended; None if it does not."""
    return next(
        (
            condition.last_transition_time
            for condition in job.status.conditions
            if condition.type is ConditionType.SUSPENDED
            and condition.status is ConditionStatus.TRUE
        ),
        None,
    )


def cleanup_at(job: ElasticJob) -> datetime | None:
    """Return the time from which pods of a finished job may be deleted; None before its
    completionTime is set.

    Until then the agents stop the workers; deleting a pod also deletes its logs.
    """
    ended = job.status.completion_time
    if ended is None:
        return None
    return ended + shutdown_time(job)


def access_ends_at(job: ElasticJob, observed: Observed) -> datetime | None:
    """Return the time from which the agents of a finished job need no access to its records.

    Its pods have ended then, or their time to end is over: a pod that hangs must not keep access.
    None while the job or its rendezvous continues.
    """
    view, ended = observed.rendezvous, job.status.completion_time
    if job.status.phase not in FINISHED or ended is None or not view.readable:
        return None
    if not view.ended and observed.bounds is not None:
        return None
    return cleanup_at(job) if any(pod.active for pod in observed.pods) else ended


def expires_at(job: ElasticJob) -> datetime | None:
    """Return the time of deletion of a finished job; None without a TTL or before its end."""
    ttl, ended = job.spec.run_policy.ttl_seconds_after_finished, job.status.completion_time
    return None if ttl is None or ended is None else ended + timedelta(seconds=ttl)
