"""End of a final round: success, a cause for the next round, or nothing yet. No I/O."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from elasticjob_rendezvous.core import absence, verdicts
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.counts import leave_cause
from elasticjob_rendezvous.core.newcomers import must_wait, newcomers
from elasticjob_rendezvous.core.peers import Peers
from elasticjob_rendezvous.core.records import Cause, CauseKind, MemberState
from elasticjob_rendezvous.core.roster import Roster, Seat, legal_size
from elasticjob_rendezvous.core.timers import Timers
from elasticjob_rendezvous.core.view import View

QUIET_PART = 6
LEAVE_COALESCE_SECONDS = 0.2
"""Maximum time after the first leave for another one to share its round."""
LEAVE_QUIET_SECONDS = 0.06
"""Time without another leave that ends the wait early, unless one is known to come."""


@dataclass(frozen=True, slots=True)
class FinalLook:
    """Judgement of a final round.

    `cause`, if set, opens the next round; `symptom` is the time of the first sign of trouble.
    """

    succeeded: bool = False
    cause: Cause | None = None
    symptom: float | None = None


def look_at_final(
    view: View,
    roster: Roster,
    bounds: Bounds,
    peers: Peers,
    timers: Timers,
    leavers: dict[str, str],
    silent: Container[str],
) -> FinalLook:
    """Judge a final round.

    `leavers` remembers the leaving members and their reasons across calls; `silent` members failed
    to confirm recently and do not count as newcomers.
    """
    number = roster.number
    done = view.dones_of(number)
    if all(seat.id in done for seat in roster.seats):
        return FinalLook(succeeded=True)
    for seat in roster.seats:
        reason = view.leaves(seat.id)
        if reason is not None:
            leavers[seat.id] = reason
    pending = [seat for seat in roster.seats if seat.id not in done]
    lost, unproven = _lost(view, pending, bounds, peers, timers, leavers)
    leaving = [seat for seat in pending if seat.id in leavers]
    if not leaving:  # else the others stopped because of the leave
        lost += [seat for seat in pending if _stopped_by_itself(seat, view, number)]
    failures = list(view.failures_of(number).values())
    if failures and (verdicts.speaks_for_itself(failures) or not (lost or leaving)):
        cause = verdicts.cause_of(failures, done.values())
        return FinalLook(cause=cause, symptom=timers.since(("failure", number)))
    if lost:
        names = tuple(seat.name for seat in lost)
        ids = [seat.id for seat in lost]
        symptom = peers.symptom(ids) or timers.since(("lost", ids[0]))
        return FinalLook(cause=Cause(CauseKind.LOSS, names), symptom=symptom)
    if leaving:
        first = timers.since(("leave", number))
        staying = [seat for seat in pending if seat.id not in leavers]
        if not _all_left(leaving, staying, number, bounds, timers):
            return FinalLook()
        # If collectives broke, or may have some time ago, the other peers are stuck in them.
        urgent = bool(failures) or any(_went_untold(seat, view) for seat in leaving)
        cause = leave_cause(leaving, leavers, bounds, urgent=urgent)
        return FinalLook(cause=cause, symptom=first)
    if done or unproven:
        return FinalLook()
    return _resize(view, roster, bounds, timers, silent)


def _lost(
    view: View,
    seats: list[Seat],
    bounds: Bounds,
    peers: Peers,
    timers: Timers,
    leavers: Container[str],
) -> tuple[list[Seat], bool]:
    """Return the members that are gone though they neither left nor were done.

    Also return whether another member is absent without proof, which holds back every planned end.
    """
    lost, unproven = [], False
    for seat in seats:
        if view.member(seat.id) is not None:
            absence.ended(seat.id, timers)
        elif seat.id not in leavers:
            if absence.is_lost(seat, view, bounds, peers, timers):
                lost.append(seat)
            else:
                unproven = True
    return lost, unproven


def _stopped_by_itself(seat: Seat, view: View, number: int) -> bool:
    """Return True if a member's workers ended without success or failure: it was cut off.

    A member that waits with an older number has only not started yet.
    """
    member = view.member(seat.id)
    if member is None:
        return False
    waits = member.record.state is MemberState.WAITING and member.record.round >= number
    return waits and seat.id not in view.failures.get(number, {})


def _went_untold(seat: Seat, view: View) -> bool:
    """Return True if a leaver is gone and only a link announced its leave."""
    last = view.last_word(seat.id)
    return view.member(seat.id) is None and (last is None or last.state is not MemberState.LEAVING)


def _all_left(
    leaving: list[Seat], staying: list[Seat], number: int, bounds: Bounds, timers: Timers
) -> bool:
    """Return True if the wait for further leaves is over."""
    leave = ("leave", number)
    if any(bounds.marked(seat.id) is not None for seat in staying):
        return timers.over(leave, LEAVE_COALESCE_SECONDS)
    return timers.calm(leave, len(leaving), LEAVE_QUIET_SECONDS, LEAVE_COALESCE_SECONDS)


def _resize(
    view: View, roster: Roster, bounds: Bounds, timers: Timers, silent: Container[str]
) -> FinalLook:
    """Judge a change of size: newcomers that raise the legal size, or an overdue scale-down."""
    size = len(roster.seats)
    if size > bounds.max_nodes:
        if timers.over(("over", roster.number), bounds.stop_grace_seconds):
            detail = f"{size} members are more than the maximum of {bounds.max_nodes}"
            return FinalLook(cause=Cause(CauseKind.SCALE_DOWN, (), detail))
        return FinalLook()
    timers.forget(("over", roster.number))
    new = [member for member in newcomers(view, roster, bounds) if member.id not in silent]
    settling = ("settle", roster.number)
    if legal_size(bounds, size + len(new)) <= size:
        timers.forget(settling)
        return FinalLook()
    first = timers.since(settling)
    if must_wait(view, roster, bounds, timers, first):
        return FinalLook()
    if size + len(new) < bounds.wanted:
        seconds = bounds.settle_seconds
        if bounds.expected is None:
            # The expected number is unknown: a quiet moment after the last newcomer is enough.
            settled = timers.calm(settling, len(new), seconds / QUIET_PART, seconds)
        else:
            settled = timers.over(settling, seconds)
        if not settled:
            return FinalLook()
    names = tuple(member.name for member in new[:16])
    return FinalLook(cause=Cause(CauseKind.JOIN, names), symptom=first)
