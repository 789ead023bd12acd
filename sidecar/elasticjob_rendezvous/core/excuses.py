"""Excuse for a round of aborted collectives: a member of it that was lost or left. Pure."""

from __future__ import annotations

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.counts import leave_cause
from elasticjob_rendezvous.core.records import ABORTED, Cause, CauseKind, because, begun_as
from elasticjob_rendezvous.core.roster import Roster, Seat
from elasticjob_rendezvous.core.view import View


def excuse(view: View, roster: Roster | None, bounds: Bounds) -> Cause | None:
    """Return the real cause of the round's end: members lost, or else leaving; None without any.

    A member that came back under a new session was lost in between, but where others leave, the
    leave may have caused that. Finished members are not missed. The cause is urgent: peers may be
    stuck.
    """
    if roster is None:
        return None
    done = view.dones_of(roster.number)
    lost: list[Seat] = []
    returned: list[Seat] = []
    reasons: dict[str, str] = {}
    for seat in roster.seats:
        if seat.id in done:
            continue
        member, reason = view.member(seat.id), view.leaves(seat.id)
        if reason is not None:
            reasons[seat.id] = reason
        elif member is None:
            lost.append(seat)
        elif seat.session not in ("", begun_as(member.record.session)):
            returned.append(seat)
        elif (mark := bounds.marked(seat.id)) is not None:
            # Asked to leave; its own leave notice may have been lost.
            reasons[seat.id] = mark.reason
    if lost or (returned and not reasons):
        return because(CauseKind.LOSS, (seat.name for seat in lost or returned), (ABORTED,))
    if not reasons:
        return None
    left = (seat for seat in roster.seats if seat.id in reasons)
    found = leave_cause(left, reasons, bounds, urgent=True)
    return because(found.kind, found.members, (*found.reasons, ABORTED), urgent=True)
