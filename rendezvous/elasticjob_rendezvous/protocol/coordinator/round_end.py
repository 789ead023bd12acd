"""End of a final round: success, a cause for the next round, or nothing yet. No I/O."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.coordinator.cause_counts import leave_cause
from elasticjob_rendezvous.protocol.coordinator.scale_up import must_wait, waiting_newcomers
from elasticjob_rendezvous.protocol.liveness import member_loss
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, MemberState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster, legal_size
from elasticjob_rendezvous.protocol.replica import View

QUIET_PART = 6
LEAVE_COALESCE_SECONDS = 0.2
"""Maximum time after the first leave for another one to share its round."""
LEAVE_QUIET_SECONDS = 0.06
"""Time without another leave that ends the wait early, unless one is known to come."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """Judgement of a final round.

    `cause`, if set, opens the next round; `symptom` is the time of the first sign of trouble.
    """

    succeeded: bool = False
    cause: Cause | None = None
    symptom: float | None = None


def round_end(
    view: View,
    roster: Roster,
    bounds: RendezvousParams,
    peers: FailureDetector,
    timers: Timers,
    leavers: dict[str, str],
    silent: Container[str],
) -> RoundEnd:
    """Judge a final round.

    `leavers` keeps the leaving members and their reasons across calls; `silent` members failed
    to confirm recently and do not count as newcomers.
    """
    number = roster.number
    done = view.dones_of(number)
    if all(assignment.id in done for assignment in roster.seats):
        return RoundEnd(succeeded=True)
    for assignment in roster.seats:
        reason = view.leaves(assignment.id)
        if reason is not None:
            leavers[assignment.id] = reason
    pending = [assignment for assignment in roster.seats if assignment.id not in done]
    lost, unproven = _lost(view, pending, bounds, peers, timers, leavers)
    leaving = [assignment for assignment in pending if assignment.id in leavers]
    if not leaving:  # else the others stopped because of the leave
        lost += [
            assignment for assignment in pending if _stopped_by_itself(assignment, view, number)
        ]
    failures = list(view.failures_of(number).values())
    if failures and (failure_policy.includes_cause(failures) or not (lost or leaving)):
        cause = failure_policy.cause_of(failures, done.values())
        return RoundEnd(cause=cause, symptom=timers.since(("failure", number)))
    if lost:
        names = tuple(assignment.name for assignment in lost)
        ids = [assignment.id for assignment in lost]
        symptom = peers.symptom(ids) or timers.since(("lost", number, ids[0]))
        return RoundEnd(cause=Cause(CauseKind.LOSS, names), symptom=symptom)
    if leaving:
        first = timers.since(("leave", number))
        staying = [assignment for assignment in pending if assignment.id not in leavers]
        if not _all_left(leaving, staying, number, bounds, timers):
            return RoundEnd()
        # If collectives broke, or may have some time ago, the other peers are stuck in them.
        urgent = bool(failures) or any(
            _left_by_link_alone(assignment, view) for assignment in leaving
        )
        cause = leave_cause(leaving, leavers, bounds, urgent=urgent)
        return RoundEnd(cause=cause, symptom=first)
    if done or unproven:
        return RoundEnd()
    return _resize(view, roster, bounds, timers, silent)


def _lost(
    view: View,
    seats: list[RankAssignment],
    bounds: RendezvousParams,
    peers: FailureDetector,
    timers: Timers,
    leavers: Container[str],
) -> tuple[list[RankAssignment], bool]:
    """Return the absent members that neither left nor were done.

    Also return True if another member is absent without proof, which delays every planned end.
    """
    lost, unproven = [], False
    for assignment in seats:
        if view.member(assignment.id) is not None:
            member_loss.ended(assignment.id, timers)
        elif assignment.id not in leavers:
            if member_loss.is_lost(assignment, view, bounds, peers, timers):
                lost.append(assignment)
            else:
                unproven = True
    return lost, unproven


def _stopped_by_itself(assignment: RankAssignment, view: View, number: int) -> bool:
    """Return True if a member's workers ended without success or failure: it was cut off.

    A member that waits with an older number has only not started yet.
    """
    member = view.member(assignment.id)
    if member is None:
        return False
    waits = member.record.state is MemberState.WAITING and member.record.round >= number
    return waits and assignment.id not in view.failures.get(number, {})


def _left_by_link_alone(assignment: RankAssignment, view: View) -> bool:
    """Return True if a leaver is gone and only a link announced its leave."""
    last = view.last_record(assignment.id)
    return view.member(assignment.id) is None and (
        last is None or last.state is not MemberState.LEAVING
    )


def _all_left(
    leaving: list[RankAssignment],
    staying: list[RankAssignment],
    number: int,
    bounds: RendezvousParams,
    timers: Timers,
) -> bool:
    """Return True if the wait for further leaves is over."""
    leave = ("leave", number)
    if any(bounds.marked(assignment.id) is not None for assignment in staying):
        return timers.over(leave, LEAVE_COALESCE_SECONDS)
    return timers.settled(leave, len(leaving), LEAVE_QUIET_SECONDS, LEAVE_COALESCE_SECONDS)


def _resize(
    view: View, roster: Roster, bounds: RendezvousParams, timers: Timers, silent: Container[str]
) -> RoundEnd:
    """Judge a change of size: newcomers that raise the legal size, or an overdue scale-down."""
    size = len(roster.seats)
    if size > bounds.max_nodes:
        if timers.over(("over", roster.number), bounds.stop_grace_seconds):
            detail = f"{size} members are more than the maximum of {bounds.max_nodes}"
            return RoundEnd(cause=Cause(CauseKind.SCALE_DOWN, (), detail))
        return RoundEnd()
    timers.forget(("over", roster.number))
    new = [member for member in waiting_newcomers(view, roster, bounds) if member.id not in silent]
    settling = ("settle", roster.number)
    if legal_size(bounds, size + len(new)) <= size:
        timers.forget(settling)
        return RoundEnd()
    first = timers.since(settling)
    if must_wait(view, roster, bounds, timers, first):
        return RoundEnd()
    if size + len(new) < bounds.wanted:
        seconds = bounds.settle_seconds
        if bounds.expected is None:
            # The expected number is unknown: a quiet moment after the last newcomer is enough.
            settled = timers.settled(settling, len(new), seconds / QUIET_PART, seconds)
        else:
            settled = timers.over(settling, seconds)
        if not settled:
            return RoundEnd()
    names = tuple(member.name for member in new[:16])
    return RoundEnd(cause=Cause(CauseKind.JOIN, names), symptom=first)
