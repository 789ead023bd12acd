"""Liveness check: after the last fault the job trains, or has rightly ended. Read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.roster import legal_size
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

ALIVE = (Workers.STARTING, Workers.RUNNING, Workers.STOPPING)


def steady(world: World) -> bool:
    """Return True if no further change is expected: the job has trained for long, or is over."""
    current = world.checker.round
    if current is not None and current.state is RoundState.CLOSED:
        return not world.alive()
    if world.controller.stop_asked_at is not None:
        return False
    lease = max(2.0, world.plan.bounds.keep_alive_seconds)
    calm = world.now - max(world.plan.quiet_at, world.checker.final_at or 0.0) > lease + 2.0
    endless = world.plan.work_seconds is None
    pending = current is not None and bool(current.pending)
    return calm and endless and not pending and not _shortcoming(world) and not _unsettled(world)


def settled(world: World) -> None:
    """Check, long enough after the last fault, that the job trains or has rightly ended."""
    if world.checker.closed_at is not None:
        if world.now - world.checker.closed_at > world.plan.recovery_seconds:
            late = [p.name for p in world.alive() if p.agent is not None or p.workers_alive]
            world.checker.need(not late, "everybody ends", f"{late} still there after the close")
        return
    asked_at = world.controller.stop_asked_at
    world.checker.need(asked_at is None, "stops end", f"nobody closed the job since {asked_at}")
    unsettled = _unsettled(world)
    world.checker.need(not unsettled, "liveness", f"{unsettled}: {world.checker.round}")
    if not legal_size(world.controller.bounds, len(_useful(world))):
        return
    turned = world.checker.final_at is not None and world.checker.final_at >= world.plan.quiet_at
    recent = world.now - (world.checker.final_at or 0.0) <= 3.0 + world.plan.start_seconds
    shortcoming = _shortcoming(world)
    final = world.checker.round is not None and world.checker.round.state is RoundState.FINAL
    if shortcoming and not (turned and (recent or not final)):
        world.checker.fail("liveness", f"{shortcoming}: {world.checker.round}")


def _unsettled(world: World) -> str:
    """Return the members that should have left or registered long ago."""
    for pod in world.alive():
        if pod.leaving and pod.agent is not None:
            return f"{pod.name} is to leave and is still there"
    for pod in _useful(world):
        if pod.agent is not None and not world.checker.sessions_of(pod.id):
            return f"{pod.name} is not registered"
    return ""


def _useful(world: World) -> list[Pod]:
    """Return the pods that stay and could train."""
    marked = {mark.member for mark in world.controller.bounds.marks}
    pods = [pod for pod in world.alive() if not pod.leaving and pod.ready]
    return [pod for pod in pods if pod.id not in marked]


def _shortcoming(world: World) -> str:
    """Return the reason why the job does not train; empty if it trains."""
    useful = {pod.id: pod for pod in _useful(world)}
    current = world.checker.round
    if current is None or current.state is not RoundState.FINAL:
        return f"{len(useful)} members, but no final round"
    roster = world.checker.sealed[current.number]
    for assignment in roster.seats:
        pod = useful.get(assignment.id)
        if pod is None:
            return f"{assignment.name} is seated but gone"
        if pod.round != roster.number or not (pod.done or pod.phase in ALIVE):
            return f"{assignment.name} does not run round {roster.number}"
    return ""
