"""Checkpoint before a job is closed: the request to its coordinator, and the operator's deadline.

Only a running round has something to save, and only if its scripts save on request. Any other job
is closed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import MAXYEAR, UTC, datetime, timedelta

from elasticjob_operator.domain.observed.etcd_records import outcome_record
from elasticjob_operator.domain.observed.state import Observed, RendezvousView, StopReason
from elasticjob_operator.domain.status.rounds import utc_time
from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import (
    STOP_MARGIN_SECONDS,
    save_error,
)
from elasticjob_rendezvous.protocol.records.closing_checkpoint import (
    NAMED_MEMBERS,
    SaveReport,
    SaveResult,
)
from elasticjob_rendezvous.protocol.records.members import Member, MemberState, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import natural_order

COORDINATOR_SECONDS = 5.0
"""Time after the checkpoint's own time in which a coordinator must close the job. It covers the
election of another coordinator."""


MOST_SECONDS = 86400.0
"""Maximum plausible time for a checkpoint."""
CLOCK_SECONDS = 5.0
"""Maximum difference to the clock of the replica that wrote a request: its time may be later."""


def save_seconds(bounds: RendezvousParams) -> float:
    """Return the time that the workers have for the checkpoint; 0 for none.

    A job's etcd user may write any value into its bounds.
    """
    seconds = bounds.leave_seconds - STOP_MARGIN_SECONDS
    return seconds if 0 <= seconds <= MOST_SECONDS else 0.0


def closes_at(bounds: RendezvousParams | None) -> datetime | None:
    """Return the UTC time from which the operator closes the job itself; None without a request."""
    if bounds is None or bounds.closing is None:
        return None
    requested = utc_time(bounds.closing.since_ms)
    if requested is None or requested.year == MAXYEAR:
        return _NEVER_REQUESTED
    return requested + _wait(bounds)


_NEVER_REQUESTED = datetime(1970, 1, 1, tzinfo=UTC)
"""Time of a request without a valid time, so that the job is closed at once."""


def _wait(bounds: RendezvousParams) -> timedelta:
    """Return the time from the request until the operator closes the job itself."""
    return timedelta(seconds=closing_seconds(bounds))


def closing_seconds(bounds: RendezvousParams) -> float:
    """Return the seconds from the request until the operator closes the job itself."""
    return save_seconds(bounds) + COORDINATOR_SECONDS


WAIT_SECONDS = 10.0
"""Maximum wait for a store that refuses writes or cannot be read. After it the pods of a stopped
job are deleted without a requested checkpoint. An election of etcd's leader takes less time."""


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Access of the operator to the store of a job at a planned stop, decided once in each pass.

    Args:
        refused: True if the store has refused writes of the operator for `WAIT_SECONDS`.
        awaited_until: end of the wait for a store that cannot be read; None for no wait.
    """

    refused: bool = False
    awaited_until: datetime | None = None


OPEN = StoreAccess()
"""Access to a store that can be used."""


def store_access(
    observed: Observed,
    now: datetime,
    wait_seconds: float = WAIT_SECONDS,
    requested_at: datetime | None = None,
) -> StoreAccess:
    """Return the access to the store of the observed job.

    A refusal that only agents report does not count, since it may concern the job's etcd user
    alone. A job without running pods has nothing to save, so there is no wait for its store.

    Args:
        wait_seconds: maximum wait for a store that cannot be read.
        requested_at: time of a request for a checkpoint. The wait then ends `wait_seconds` after
            it, even if the operator was restarted since, but not before the store has been
            unreadable for `WAIT_SECONDS`.
    """
    store, left = observed.store, wait_seconds - observed.unreadable_seconds
    if requested_at is not None:
        left = min(left, wait_seconds - (now - requested_at).total_seconds())
        left = max(left, WAIT_SECONDS - observed.unreadable_seconds)
    refuses = store is not None and not store.members and store.trouble.refuses
    if store is not None and refuses and store.seconds >= WAIT_SECONDS:
        return StoreAccess(refused=True)
    if observed.rendezvous.readable or left <= 0 or all(pod.over for pod in observed.pods):
        return OPEN
    return StoreAccess(awaited_until=now + timedelta(seconds=left))


def is_saving(
    view: RendezvousView,
    bounds: RendezvousParams | None,
    now: datetime,
    access: StoreAccess = OPEN,
) -> bool:
    """Return True if the end of a job must wait for its checkpoint, or for its unreadable store.

    A requested checkpoint gets its full time even while the rendezvous cannot be read or its store
    refuses writes.
    """
    if view.outcome is not None:
        return False
    due = closes_at(bounds)
    if bounds is not None and due is not None:
        latest = now + _wait(bounds) + timedelta(seconds=CLOCK_SECONDS)
        return now < due <= latest and (not view.readable or view.state is RendezvousState.FINAL)
    if bounds is not None and save_seconds(bounds) <= 0:
        return False
    if not view.readable and access.awaited_until is not None:
        return True
    trained = _trained(view)
    if bounds is None or access.refused:
        return False
    return bool(trained) and all(member.saves for member in trained)


@dataclass(frozen=True, slots=True)
class ClosingStep:
    """Next step towards the end of a job.

    Args:
        bounds: bounds to write, with the request for a checkpoint; None for no write.
        report: report with which to close the job; None to wait.
        wake_at: UTC time of the next check.
    """

    bounds: RendezvousParams | None = None
    report: SaveReport | None = None
    wake_at: datetime | None = None


NOT_TRAINING = ClosingStep(report=SaveReport(SaveResult.NOT_TRAINING))
"""Step for a job without running pods, although records of their members may still exist."""


def closing_step(
    view: RendezvousView,
    bounds: RendezvousParams | None,
    reason: StopReason,
    now: datetime,
    access: StoreAccess = OPEN,
) -> ClosingStep:
    """Return the next step of a rendezvous that is not closed yet."""
    if not is_saving(view, bounds, now, access):
        return ClosingStep(report=save_report(view, bounds, access.refused))
    if bounds is None or (bounds.closing is None and not view.readable):
        return ClosingStep(wake_at=access.awaited_until)
    outcome, closing = outcome_record(OutcomeKind.STOPPED, reason), bounds.closing
    writable = view.readable and not access.refused
    if closing is not None and (not writable or closing.outcome == outcome):
        return ClosingStep(wake_at=closes_at(bounds))
    since_ms = int(now.timestamp() * 1000) if closing is None else closing.since_ms
    requested = replace(bounds, closing=ClosingRequest(outcome, since_ms))
    return ClosingStep(requested, wake_at=closes_at(requested))


def _trained(view: RendezvousView) -> list[Member]:
    """Return the members with workers in the final round, also of pods that are being deleted."""
    if view.state is not RendezvousState.FINAL:
        return []
    return [
        member
        for member in view.members
        if member.round == view.round
        and (member.runs or (member.state is MemberState.LEAVING and not member.stopped))
    ]


NOT_ASKED = "etcd refused the request for a checkpoint"
"""Error in the report on workers that got no request to save."""


def save_report(
    view: RendezvousView, bounds: RendezvousParams | None, refused: bool = False
) -> SaveReport:
    """Return the report on a job that the operator closes itself, or whose pods it deletes while
    the store refuses writes (`refused`)."""
    trained = _trained(view)
    if not trained:
        return SaveReport(SaveResult.NOT_TRAINING)
    requested = bounds is not None and bounds.closing is not None
    supported = all(member.saves for member in trained)
    result = SaveResult.NO_TIME if supported else SaveResult.NOT_SUPPORTED
    unsaved = [
        member.name for member in trained if not (member.saved if requested else member.saves)
    ]
    unsaved.sort(key=natural_order)
    if requested and any(member.completed for member in trained):  # the checkpoint of all
        result, unsaved = SaveResult.SAVED, []
    elif requested:
        result = SaveResult.TIMED_OUT
    error = save_error(trained) if result is SaveResult.TIMED_OUT else ""
    if refused and result is SaveResult.NO_TIME and bounds is not None and save_seconds(bounds) > 0:
        error = NOT_ASKED
    return SaveReport(
        result,
        max(member.step for member in trained),
        max(member.checkpoint_step for member in trained),
        tuple(unsaved[:NAMED_MEMBERS]),
        error,
    )
