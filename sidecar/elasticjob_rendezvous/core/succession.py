"""Election of the coordinator: takeover, resignation, and the writes of its role. No I/O.

`leadership` is the view that the other members have of the coordinator; `deciding` makes its
decisions.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import deciding, sessions
from elasticjob_rendezvous.core import own as own_key
from elasticjob_rendezvous.core.effects import Write
from elasticjob_rendezvous.core.kv import Txn
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.own import Own
from elasticjob_rendezvous.core.records import Member, begun_as
from elasticjob_rendezvous.core.view import Versioned


def take_over(our: Membership) -> None:
    """Take over as coordinator, and adopt the workers that a predecessor left behind."""
    our.coordinator.take_over(our.now, our.leadership.proven_gone)
    number = our.current.number if our.current else 0
    for id, session in list(our.leadership.orphaned):
        member = our.view.member(id)
        if member is not None and begun_as(member.record.session) == session:
            our.effects += our.coordinator.peers.adopt(
                member.record, number, our.now, our.config.orphan_seconds
            )
    our.effects += our.leadership.unlink(our.now)
    our.note(f"{our.config.identity.name} is now the coordinator")


def resign(our: Membership, stored: Versioned[Member]) -> Txn:
    """Resign as coordinator: this member's key comes back as the youngest."""
    sessions.begin(our)
    our.coordinator.resign()
    our.note(f"{our.config.identity.name} resigns as coordinator")
    return own_key.move(our.own, stored)


def next_write(our: Membership, own: Own, stored: Versioned[Member]) -> Write | None:
    """Return the write due for the whole job: the round's next step, or another coordinator."""
    if not our.coordinator.active:
        return _depose(our, own, stored)
    if our.lease.holds(our.now):
        act = deciding.decide(our.coordinator, our.view, stored, our.clock, our.config.bounds)
        if act is not None:
            our.inflight.note = act.note
            return Write(act.txn)
        our.alarm.set(our.coordinator.timers.wake)
    roster = our.rounds.roster
    others = {seat.id for seat in roster.seats} if roster else set()
    if our.coordinator.peers.cut_off(others - {stored.record.id}):
        return Write(resign(our, stored))
    return None


def _depose(our: Membership, own: Own, stored: Versioned[Member]) -> Write | None:
    """Remove a coordinator whose agent is proven dead, if this member must act."""
    leader = our.leadership.to_depose(our.view, our.now, our.alarm)
    if leader is None:
        return None
    name = leader.record.name
    if (leader.record.id, leader.record.session) in our.leadership.proven_gone:
        our.inflight.note = f"deleted the key of coordinator {name}: it is gone"
        return Write(own_key.depose(own, stored, leader))
    our.inflight.note = f"coordinator {name} was set aside: it lost its agent"
    return Write(own_key.set_aside(own, stored, leader))
