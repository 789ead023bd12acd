"""Election of the coordinator: takeover, resignation, and the writes of its role. No I/O.

`leader_link` is the view that the other members have of the coordinator; `coordinator` makes its
decisions.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol import member_key as own_key
from elasticjob_rendezvous.protocol import session as sessions
from elasticjob_rendezvous.protocol.coordinator import coordinator
from elasticjob_rendezvous.protocol.effects import Read, Write
from elasticjob_rendezvous.protocol.kv import Txn
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.members import Member, begun_as
from elasticjob_rendezvous.protocol.replica import Versioned
from elasticjob_rendezvous.protocol.state import EngineState


def take_over(state: EngineState) -> None:
    """Take over as coordinator, and adopt the workers that a predecessor left behind."""
    state.coordinator.take_over(state.now, state.leader_link.proven_gone)
    number = state.current.number if state.current else 0
    for id, session in list(state.leader_link.orphaned):
        member = state.view.member(id)
        if member is not None and begun_as(member.record.session) == session:
            state.effects += state.coordinator.peers.adopt(
                member.record, number, state.now, state.config.orphan_seconds
            )
    state.effects += state.leader_link.unlink(state.now)
    state.note(f"{state.config.identity.name} is now the coordinator")


def resign(state: EngineState, stored: Versioned[Member]) -> Txn:
    """Resign as coordinator: this member's key comes back as the youngest."""
    sessions.begin(state)
    state.coordinator.resign()
    state.note(f"{state.config.identity.name} resigns as coordinator")
    return own_key.recreate(state.own, stored)


def next_request(
    state: EngineState, own: MemberKey, stored: Versioned[Member]
) -> Read | Write | None:
    """Return the request due for the whole job: the round's next step, or another coordinator."""
    if not state.coordinator.active:
        return _depose(state, own, stored)
    if state.lease.holds(state.now):
        act = coordinator.decide(
            state.coordinator, state.view, stored, state.clock, state.config.bounds
        )
        if act is not None:
            state.inflight.note = act.note
            return Write(act.txn)
        if state.coordinator.must_read:
            return Read(state.everything)
        state.alarm.set(state.coordinator.timers.wake)
    roster = state.rounds.roster
    others = {assignment.id for assignment in roster.seats} if roster else set()
    if state.coordinator.peers.cut_off(others - {stored.record.id}):
        return Write(resign(state, stored))
    return None


def _depose(state: EngineState, own: MemberKey, stored: Versioned[Member]) -> Write | None:
    """Remove a coordinator whose agent is proven dead, if this member must act."""
    leader = state.leader_link.to_depose(state.view, state.now, state.alarm)
    if leader is None:
        return None
    name = leader.record.name
    if (leader.record.id, leader.record.session) in state.leader_link.proven_gone:
        state.inflight.note = f"deleted the key of coordinator {name}: it is gone"
        return Write(own_key.depose(own, stored, leader))
    state.inflight.note = f"coordinator {name} was set aside: it lost its agent"
    return Write(own_key.set_aside(own, stored, leader))
