"""Delay of newcomers until the next checkpoint of a round. No I/O."""

from __future__ import annotations

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.records.members import Member, MemberState, Save
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, legal_size
from elasticjob_rendezvous.protocol.replica import View


def waiting_newcomers(view: View, roster: Roster, bounds: RendezvousParams) -> list[Member]:
    """Return the members without a rank assignment that wait for one and may have it."""
    seated = {assignment.id for assignment in roster.seats}
    return [
        versioned.record
        for id, versioned in view.members().items()
        if id not in seated
        and versioned.record.state is MemberState.WAITING
        and bounds.marked(id) is None
        and bounds.agrees(versioned.record)
    ]


def must_wait(
    view: View, roster: Roster, bounds: RendezvousParams, timers: Timers, since: float
) -> bool:
    """Return True if newcomers that have waited since `since` must wait for a checkpoint.

    They need not once a checkpoint was reported after that time, or the maximum wait is over. Both
    times are of the coordinator's clock: it notices a checkpoint as a change of the reports.
    """
    number = roster.number
    landed = timers.since(("checkpoint", number, _checkpoint(view, roster)))
    if bounds.scale_up_wait_seconds <= 0 or landed > since:
        return False
    return not timers.passed(since + bounds.scale_up_wait_seconds)


def _checkpoint(view: View, roster: Roster) -> int:
    """Return the newest checkpoint of the round that any of its members reported."""
    members = (view.member(assignment.id) for assignment in roster.seats)
    return max(
        (
            member.record.checkpoint_step
            for member in members
            if member is not None and member.record.round == roster.number
        ),
        default=-1,
    )


def waiting_reason(
    bounds: RendezvousParams, seats: int, waiting: int, save: Save | None = None
) -> str:
    """Return the reason for the wait of `waiting` newcomers of a final round, for people.

    A save before the end of the round may wait for a script that makes no further step.
    """
    if waiting == 0:
        return ""
    if save is not None:
        return f"the workers save after their next step, and stop after {save.seconds:g} s at most"
    if legal_size(bounds, seats + waiting) <= seats:
        return f"the size of {seats} does not grow by {waiting}: they are spare"
    if bounds.scale_up_wait_seconds > 0:
        most = bounds.scale_up_wait_seconds
        return f"newcomers wait for the next checkpoint, for {most:g} s at most"
    return ""
