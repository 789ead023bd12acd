"""Next action of the coordinator: one evaluation of the replica, at most one transaction. No I/O.

This module holds the order of the checks; the checks are in `fencing`, `bootstrap` and `data_loss`
(no round, or not the newest), `charging` (ended rounds), and one module for each state of a round.
`round_writes` writes for all of them; `memory` lasts from one decision to the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elasticjob_rendezvous.protocol.coordinator import bootstrap, data_loss, final, frozen, joinable
from elasticjob_rendezvous.protocol.coordinator.charging import (
    apply_late_preemption,
    decide_charges,
)
from elasticjob_rendezvous.protocol.coordinator.closing import close
from elasticjob_rendezvous.protocol.coordinator.fencing import duplicates, fence_over
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate, Snapshot
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.liveness import member_loss
from elasticjob_rendezvous.protocol.liveness.failure_detector import gone_keys
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.members import Member, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.replica import Versioned, View


def decide(
    memory: Coordinator,
    view: View,
    own: Versioned[Member],
    clock: Clock,
    initial_bounds: RendezvousParams | None = None,
) -> RoundUpdate | None:
    """Return the next transaction, if one is due; `memory.timers.wake` is the next time.

    `own` is the coordinator's key, `initial_bounds` the bounds to write if no operator writes them.
    """
    timers, keys = memory.timers, view.keys
    timers.begin_step(clock.now)
    memory.awaited = 0
    if not view.malformed.keys().isdisjoint((keys.round, keys.bounds)):
        return None
    if view.bounds is None:
        return (
            bootstrap.write_bounds(Snapshot(view, own, initial_bounds, clock), memory)
            if initial_bounds
            else None
        )
    snapshot = Snapshot(view, own, view.bounds.record, clock)
    timers.since(member_loss.TOOK_OVER)
    fences = duplicates(view, own) + gone_keys(memory.peers, view.members())
    fences = [fence for fence in fences if fence.key != own.key]
    if fences:
        return fence_over(view, own, fences)
    if view.round is None:
        if view.known() == 0:
            return bootstrap.open_first(snapshot, memory)
        return data_loss.restore(snapshot, memory.timers, memory.last)
    return data_loss.overtake(snapshot, timers) or _in_round(memory, snapshot)


def _in_round(memory: Coordinator, snapshot: Snapshot) -> RoundUpdate | None:
    """Return the action due in the current round, the newest that any member knows."""
    current, timers, closing = snapshot.current, memory.timers, snapshot.bounds.closing
    timers.since(("state", current.number, current.state))
    if closing is not None and current.state in (RoundState.JOINABLE, RoundState.FROZEN):
        report = SaveReport(SaveResult.NOT_TRAINING)
        return close(snapshot, replace(closing.outcome, save=report))
    if current.state is not RoundState.FROZEN and (
        act := decide_charges(snapshot, memory) or apply_late_preemption(snapshot)
    ):
        return act
    if memory.must_read:
        return None
    match current.state:
        case RoundState.JOINABLE:
            return joinable.next_act(snapshot, memory)
        case RoundState.FROZEN:
            return frozen.next_act(snapshot, memory)
        case RoundState.FINAL:
            return final.next_act(snapshot, memory)
        case RoundState.CLOSED:
            return None
        case _:
            assert_never(current.state)
