"""Leave of a member: announce it, keep the key for others to read, then delete it. No I/O.

`departure` holds the start of the leave and its timeouts.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import own as own_key
from elasticjob_rendezvous.core import saving, succession
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.kv import Txn
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.own import Own
from elasticjob_rendezvous.core.records import Member, MemberState, RoundState
from elasticjob_rendezvous.core.view import Versioned


def next_write(our: Membership, own: Own, stored: Versioned[Member]) -> Txn | None:
    """Announce the leave while workers still stop; then delete this member's key."""
    at, round = our.current, our.local.round
    seated = at is not None and at.state is RoundState.FINAL and at.number == round
    said = stored.record.state is MemberState.LEAVING and stored.record.stopped
    silent = round == 0 or stored.record.state is MemberState.DONE
    if our.crew.idle and (silent or (said and (not seated or _was_seen(our)))):
        return own_key.drop(own, stored)
    others = len(our.view.members()) > 1
    if our.coordinator.active and others and stored.record.state is not MemberState.LEAVING:
        return succession.resign(our, stored)
    return own_key.say_leaving(own, stored)


def _was_seen(our: Membership) -> bool:
    """Return True if no member needs to read the reason of the leave any more."""
    roster = our.rounds.roster
    alone = roster is not None and len(roster.seats) == 1
    return alone or our.local.done or our.departure.was_seen(our.now, our.alarm)


def is_saving(our: Membership) -> bool:
    """Return True while a leaving member's workers run on to be asked for a checkpoint and save."""
    at, since = our.current, our.departure.since
    if at is None or since is None or not our.local.saves:
        return False
    if at.state is not RoundState.FINAL or at.number != our.local.round:
        return False
    bounds = our.bounds or Bounds(1, 1)
    leave_seconds = bounds.leave_seconds - saving.STOP_MARGIN_SECONDS
    seconds = leave_seconds if at.save is not None else min(saving.ASK_SECONDS, leave_seconds)
    return not our.alarm.passed(since + seconds, our.now)
