"""Actions of the coordinator in a frozen round: wait for confirmations, then seal. No I/O."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.histories import at_seal
from elasticjob_rendezvous.core.kv import Compare, Op, Put, Target
from elasticjob_rendezvous.core.records import Cause, CauseKind, Member, MemberState, RoundState
from elasticjob_rendezvous.core.retention import outdated
from elasticjob_rendezvous.core.roster import legal_size, seal


def next_act(scene: Scene, memory: Coordinator) -> Act | None:
    """Return the action due in a frozen round: none while an asked member may still confirm."""
    current, bounds, timers = scene.current, scene.bounds, memory.timers
    timers.forget("join")
    confirmed, silent = _answers(scene)
    asked = ("state", current.number, current.state)
    if silent and not timers.over(asked, bounds.confirm_seconds):
        memory.awaited = len(silent)
        return None
    for late in silent:
        memory.silenced.silence(late.id, scene.clock.now)
    size = legal_size(bounds, len(confirmed))
    if size == 0:
        return _reopen(scene, silent)
    return _seal(scene, memory, confirmed[:size])


def _answers(scene: Scene) -> tuple[list[Member], list[Member]]:
    """Split the members that were asked and still wait: confirmed this very revision, or silent."""
    assert scene.view.round is not None
    confirmed, silent = [], []
    for id in scene.current.ids:
        member = scene.view.member(id)
        if member is None or member.record.state is not MemberState.WAITING:
            continue
        if member.record.confirmed == scene.view.round.modified:
            confirmed.append(member.record)
        else:
            silent.append(member.record)
    return confirmed, silent


def _reopen(scene: Scene, silent: list[Member]) -> Act:
    names = tuple(late.name for late in silent)
    cause = Cause(CauseKind.UNCONFIRMED, names, "too few members confirmed")
    number = scene.current.number + 1
    again = replace(scene.current, number=number, state=RoundState.JOINABLE, ids=(), cause=cause)
    return write_round(scene, again, f"round {number} opens: unconfirmed")


def _seal(scene: Scene, memory: Coordinator, members: list[Member]) -> Act:
    """Write the only roster of this number, the round's cost so far, and the state `final`."""
    current, bounds, keys = scene.current, scene.bounds, scene.view.keys
    number = current.number
    ceiling_nodes = bounds.ceiling_nodes or bounds.max_nodes
    roster = seal(number, members, restarts=len(current.charged), ceiling_nodes=ceiling_nodes)
    sealed = encode(roster)
    detect_ms = memory.detected_ms.get(number)
    history = at_seal(current, roster, memory.timers, detect_ms, scene.clock)
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
    )
    ops: tuple[Op, ...] = (
        Put(keys.roster(number), sealed),
        Put(keys.seats, sealed),
        Put(keys.history(number), encode(history)),
        *outdated(scene.view, number),
    )
    only_once = Compare(keys.roster(number), Target.CREATE, 0)
    memory.leavers.clear()
    note = f"round {number} is final: {len(roster.seats)} members, world {roster.world_size}"
    return write_round(scene, final, note, ops, (only_once,))
