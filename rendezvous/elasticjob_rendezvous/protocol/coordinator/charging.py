"""Charging of ended rounds: failures charged or excused, leaves turned into preemptions. No I/O."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import crash_loop, failure_policy, repeated_losses
from elasticjob_rendezvous.protocol.coordinator.cause_counts import (
    counted,
    leave_cause,
    with_late_preemption,
)
from elasticjob_rendezvous.protocol.coordinator.closing import close, outcome_of_charge
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    corrected_cause,
    write_round,
)
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.records.members import (
    ABORTED,
    Cause,
    CauseKind,
    RoundState,
    begun_as,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.replica import View


def cause_of_absence(view: View, roster: Roster | None, bounds: RendezvousParams) -> Cause | None:
    """Return the real cause of the round's end: members lost, or else leaving; None without any.

    A member with a new session was lost in between, and one that was cut off had ended its workers,
    unless others left: then their leave may have caused that. Finished members do not count as
    absent. The cause is urgent: peers may be stuck in a collective.
    """
    if roster is None:
        return None
    done = view.dones_of(roster.number)
    lost: list[RankAssignment] = []
    returned: list[RankAssignment] = []
    reasons: dict[str, str] = {}
    for assignment in roster.seats:
        if assignment.id in done:
            continue
        member, reason = view.member(assignment.id), view.leaves(assignment.id)
        if reason is not None:
            reasons[assignment.id] = reason
        elif member is None:
            lost.append(assignment)
        elif assignment.session not in ("", begun_as(member.record.session)):
            returned.append(assignment)
        elif (drain_request := bounds.marked(assignment.id)) is not None:
            # Asked to leave; its own leave notice may have been lost.
            reasons[assignment.id] = drain_request.reason
        elif member.record.cut_off_round == roster.number:
            returned.append(assignment)
    if lost or (returned and not reasons):
        return cause_with_reasons(
            CauseKind.LOSS, (assignment.name for assignment in lost or returned), (ABORTED,)
        )
    if not reasons:
        return None
    left = (assignment for assignment in roster.seats if assignment.id in reasons)
    found = leave_cause(left, reasons, bounds, urgent=True)
    return cause_with_reasons(found.kind, found.members, (*found.reasons, ABORTED), urgent=True)


def decide_charges(snapshot: Snapshot, memory: Coordinator) -> RoundUpdate | None:
    """Charge or excuse the failure of an ended round, once the decision is due.

    A consequence is charged only on a new read: a watch that delivers nothing hides the loss.
    """
    current, timers = snapshot.current, memory.timers
    if current.state is RoundState.CLOSED:
        return None
    for number in current.pending:
        if not failure_policy.includes_cause(snapshot.view.failures_of(number).values()):
            reason = cause_of_absence(
                snapshot.view, snapshot.view.rosters.get(number), snapshot.bounds
            )
            if reason is not None:
                return _leave_uncharged(snapshot, number, reason)
            if not _decision_is_due(snapshot, number, memory.peers, timers):
                if memory.doubted == number:  # a later charge needs a read of its own time
                    memory.doubted = memory.checked = 0
                continue
            memory.doubted = number
            if memory.must_read:
                return None
        return _charge(snapshot, number, timers)
    return None


def _leave_uncharged(snapshot: Snapshot, number: int, reason: Cause) -> RoundUpdate:
    """Leave a failure uncharged; a next round that began for the failure gets the real cause."""
    current = snapshot.current
    cause, roster = current.cause, snapshot.view.rosters.get(number)
    registered, utc_ms = snapshot.view.members(), snapshot.clock.utc_ms
    losses = repeated_losses.after_loss(current, reason, roster, registered, utc_ms)
    if cause.kind is CauseKind.FAILURE and current.number == number + 1:
        cause = repeated_losses.explained(reason, losses, roster, snapshot.bounds)
    counts = counted(current.counts, reason.kind)
    pending = _without(current.pending, number)
    uncharged = replace(current, pending=pending, cause=cause, counts=counts, losses=losses)
    gone = ", ".join(reason.members[:3])
    note = f"round {number}: failure not charged: {gone} was lost or left"
    ops = corrected_cause(snapshot.view.histories.get(current.number), cause)
    return write_round(snapshot, uncharged, note, ops)


def _charge(snapshot: Snapshot, number: int, timers: Timers) -> RoundUpdate:
    current = snapshot.current
    failures = snapshot.view.failures_of(number).values()
    streak = crash_loop.after_failure(current.streak, failures, crash_loop.lived(number, timers))
    cause = current.cause
    if cause.kind is CauseKind.FAILURE and current.previous == number:
        cause = crash_loop.explained(crash_loop.corrected_cause(current, failures), streak)
    charges = (*current.charged, number)
    pending = _without(current.pending, number)
    charged = replace(current, pending=pending, charged=charges, streak=streak, cause=cause)
    if outcome := outcome_of_charge(snapshot, charges, streak, number):
        return close(snapshot, outcome, charged)
    return write_round(snapshot, charged, f"round {number}: failure charged")


def _without(pending: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in pending if other != number)


def _decision_is_due(
    snapshot: Snapshot, number: int, peers: FailureDetector, timers: Timers
) -> bool:
    """Return True if no loss or leave that explains the failure can be reported any more.

    The wait is twice as long while a member of that round is silent, or has not reported the end of
    its workers. Only the lease of a silent member shows if it is lost; the other may be about to
    report a failure or a leave.
    """
    window = failure_policy.window_seconds(snapshot.bounds)
    if not timers.over(("charge", number), window):
        return False
    roster = snapshot.view.rosters.get(number)
    seats = roster.seats if roster else ()
    silent = any(
        peers.silent(assignment.id) and not peers.alive(assignment.id, timers.now)
        for assignment in seats
    )
    if not silent and not _awaits_reports(snapshot.view, number):
        return True
    return timers.over(("charge", number), 2 * window)


def _awaits_reports(view: View, number: int) -> bool:
    """Return True if a member's last report is older than the end of its workers of that round."""
    found = (view.member(assignment.id) for assignment in view.undone(number))
    records = [member.record for member in found if member is not None]
    return any(
        record.round < number or (record.runs and record.round == number) for record in records
    )


def apply_late_preemption(snapshot: Snapshot) -> RoundUpdate | None:
    """Turn a leave into a preemption if the operator's report comes after the member's own."""
    current = snapshot.current
    ended = snapshot.view.rosters.get(current.number - 1)
    if current.state is RoundState.CLOSED or ended is None:
        return None
    changed = with_late_preemption(current.cause, current.counts, ended.seats, snapshot.bounds)
    if changed is None:
        return None
    cause, counts = changed
    known = replace(current, cause=cause, counts=counts)
    note = f"round {current.number}: {', '.join(cause.members[:3])} was preempted"
    ops = corrected_cause(snapshot.view.histories.get(current.number), cause)
    return write_round(snapshot, known, note, ops)
