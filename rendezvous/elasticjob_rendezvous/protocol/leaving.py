"""Leave of a member: announce it, keep the key for others to read, then delete it. No I/O.

`state` holds the start of the leave and its timeouts.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol import member_key as own_key
from elasticjob_rendezvous.protocol.coordinator import checkpoint_gate, election
from elasticjob_rendezvous.protocol.kv import Txn
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.members import Member, MemberState, Restore, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.replica import Versioned
from elasticjob_rendezvous.protocol.state import EngineState


def next_write(state: EngineState, own: MemberKey, stored: Versioned[Member]) -> Txn | None:
    """Announce the leave while workers still stop; then delete this member's key."""
    at, round = state.current, state.local.round
    seated = at is not None and at.state is RoundState.FINAL and at.number == round
    announced = stored.record.state is MemberState.LEAVING and stored.record.stopped
    silent = round == 0 or stored.record.state is MemberState.DONE
    if state.worker_group.idle and (silent or (announced and (not seated or _was_seen(state)))):
        return own_key.delete(own, stored)
    others = len(state.view.members()) > 1
    if state.coordinator.active and others and stored.record.state is not MemberState.LEAVING:
        return election.resign(state, stored)
    return own_key.write_leaving(own, stored)


def _was_seen(state: EngineState) -> bool:
    """Return True if no member needs to read the reason of the leave any more."""
    roster = state.rounds.roster
    alone = roster is not None and len(roster.seats) == 1
    return alone or state.local.done or state.leave_state.was_seen(state.now, state.alarm)


def is_saving(state: EngineState) -> bool:
    """Return True while a leaving member's workers run on to restore, to be asked, and to save."""
    at, leave, local = state.current, state.leave_state, state.local
    if at is None or leave.since is None:
        return False
    if at.state is not RoundState.FINAL or at.number != local.round:
        return False
    bounds = state.bounds or RendezvousParams(1, 1)
    until = leave.since + bounds.leave_seconds - checkpoint_gate.STOP_MARGIN_SECONDS
    if local.restore is not Restore.PENDING:
        if not (local.saves or local.keeps):
            return False
        if at.save is None and leave.restored_since is not None:
            until = min(until, leave.restored_since + checkpoint_gate.ASK_SECONDS)
    return not state.alarm.passed(until, state.now)
