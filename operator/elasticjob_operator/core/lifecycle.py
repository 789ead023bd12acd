"""The phases of a job and what leads from one to the next."""

from __future__ import annotations

from datetime import datetime, timedelta

from elasticjob_operator.core.grace import winding_down
from elasticjob_operator.core.rendezvous_view import OutcomeKind, RendezvousView, StopReason
from elasticjob_operator.model.enums import ConditionStatus, ConditionType, Phase, RendezvousState
from elasticjob_operator.model.job import ElasticJob

FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})

NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset(
        {Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED}
    ),
    Phase.RUNNING: frozenset({Phase.RESTARTING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED}),
    Phase.RESTARTING: frozenset({Phase.RUNNING, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED}),
    Phase.SUSPENDED: frozenset(
        {Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.SUCCEEDED, Phase.FAILED}
    ),
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.INTERRUPTED: frozenset(set(Phase) - {Phase.INTERRUPTED}),
}
"""Legal changes of phase. A pass may miss what lay between, so some skip a phase."""


def next_phase(job: ElasticJob, view: RendezvousView, now: datetime) -> Phase:
    """The phase the job is in; always the one in its status or a legal successor of it."""
    current = job.status.phase or Phase.PENDING
    if current is Phase.INTERRUPTED:  # started again
        current = Phase.PENDING
    if current in FINISHED:
        return current
    if view.outcome is not None and view.ended:
        return Phase.SUCCEEDED if view.outcome.kind is OutcomeKind.SUCCEEDED else Phase.FAILED
    if job.spec.run_policy.suspend:
        return Phase.SUSPENDED
    if deadline_exceeded(job, now):
        return Phase.FAILED
    return _forming_or_running(current, view)


def _forming_or_running(current: Phase, view: RendezvousView) -> Phase:
    if not view.readable:
        return Phase.PENDING if current is Phase.SUSPENDED else current
    if view.state is RendezvousState.FINAL:
        return Phase.RUNNING
    if current in (Phase.RUNNING, Phase.RESTARTING):
        return Phase.RESTARTING
    # What was trained before a suspension does not make its resumption a restart.
    ran = any(found.nodes for found in view.rounds) and not view.suspended
    return Phase.RESTARTING if ran else Phase.PENDING


def deadline(job: ElasticJob) -> datetime | None:
    """When the job has been active for too long; None without a deadline or before its start."""
    seconds, start = job.spec.run_policy.active_deadline_seconds, job.status.start_time
    if seconds is None or start is None:
        return None
    return start + timedelta(seconds=seconds)


def deadline_exceeded(job: ElasticJob, now: datetime) -> bool:
    """Whether the job, not suspended, is past its deadline."""
    due = deadline(job)
    return due is not None and due <= now and not job.spec.run_policy.suspend


def failed_by_deadline(job: ElasticJob) -> bool:
    """Whether the status says that the job ended by its deadline."""
    return any(
        condition.type is ConditionType.FAILED
        and condition.status is ConditionStatus.TRUE
        and condition.reason == StopReason.DEADLINE_EXCEEDED
        for condition in job.status.conditions
    )


def suspended_at(job: ElasticJob) -> datetime | None:
    """Since when the status says that the job is suspended; None where it does not."""
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
    """When the pods of a finished job may be deleted; None before its status says it ended.

    Their agents need the time to stop the workers, and their logs go with them.
    """
    ended = job.status.completion_time
    if ended is None:
        return None
    return ended + winding_down(job)


def expires_at(job: ElasticJob) -> datetime | None:
    """When a finished job is to be deleted; None when never or not yet finished."""
    ttl, ended = job.spec.run_policy.ttl_seconds_after_finished, job.status.completion_time
    return None if ttl is None or ended is None else ended + timedelta(seconds=ttl)
