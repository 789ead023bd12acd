"""Actions of the coordinator in a frozen round: wait for confirmations, then seal. No I/O."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.coordinator import repeated_losses
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    at_seal,
    outdated,
    write_round,
)
from elasticjob_rendezvous.protocol.kv import Compare, Op, Put, Target
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import legal_size, seal


def next_act(snapshot: Snapshot, memory: Coordinator) -> RoundUpdate | None:
    """Return the action due in a frozen round: none while an asked member may still confirm."""
    current, bounds, timers = snapshot.current, snapshot.bounds, memory.timers
    timers.forget("join")
    confirmed, silent = _answers(snapshot)
    timer = ("state", current.number, current.state)
    if silent and not timers.over(timer, bounds.confirm_seconds):
        memory.awaited = len(silent)
        return None
    assert snapshot.view.round is not None
    for late in silent:
        memory.silenced.silence(late.id, snapshot.view.round.modified, snapshot.clock.now)
    size = legal_size(bounds, len(confirmed))
    if size == 0:
        return _reopen(snapshot, silent)
    return _seal(snapshot, memory, confirmed[:size])


def _answers(snapshot: Snapshot) -> tuple[list[Member], list[Member]]:
    """Split the members that were asked and still wait: confirmed this very revision, or silent."""
    assert snapshot.view.round is not None
    confirmed, silent = [], []
    for id in snapshot.current.ids:
        member = snapshot.view.member(id)
        if member is None or member.record.state is not MemberState.WAITING:
            continue
        if member.record.confirmed == snapshot.view.round.modified:
            confirmed.append(member.record)
        else:
            silent.append(member.record)
    return confirmed, silent


def _reopen(snapshot: Snapshot, silent: list[Member]) -> RoundUpdate:
    names = tuple(late.name for late in silent)
    cause = Cause(CauseKind.UNCONFIRMED, names, "too few members confirmed")
    number = snapshot.current.number + 1
    again = replace(snapshot.current, number=number, state=RoundState.JOINABLE, ids=(), cause=cause)
    return write_round(snapshot, again, f"round {number} opens: unconfirmed")


def _seal(snapshot: Snapshot, memory: Coordinator, members: list[Member]) -> RoundUpdate:
    """Write the only roster of this number, the round's cost so far, and the state `final`."""
    current, bounds, keys = snapshot.current, snapshot.bounds, snapshot.view.keys
    number = current.number
    ceiling_nodes = bounds.ceiling_nodes or bounds.max_nodes
    roster = seal(number, members, restarts=len(current.charged), ceiling_nodes=ceiling_nodes)
    sealed = encode(roster)
    detect_ms = memory.detected_ms.get(number)
    history = at_seal(current, roster, memory.timers, detect_ms, snapshot.clock)
    utc_ms = snapshot.clock.utc_ms
    losses = repeated_losses.at_seal(snapshot.view, current, roster, bounds, utc_ms)
    final = replace(
        current,
        state=RoundState.FINAL,
        ids=(),
        previous=number,
        nodes=len(roster.seats),
        world_size=roster.world_size,
        master_address=roster.master_address,
        master_port=roster.master_port,
        master_name=roster.seats[0].name,
        losses=losses,
    )
    ops: tuple[Op, ...] = (
        Put(keys.roster(number), sealed),
        Put(keys.seats, sealed),
        Put(keys.history(number), encode(history)),
        *outdated(snapshot.view, number),
    )
    only_once = Compare(keys.roster(number), Target.CREATE, 0)
    memory.leavers.clear()
    note = f"round {number} is final: {len(roster.seats)} members, world {roster.world_size}"
    return write_round(snapshot, final, note, ops, (only_once,))
