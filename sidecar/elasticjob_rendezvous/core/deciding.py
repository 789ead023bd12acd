"""Next action of the coordinator: one look at the view, at most one transaction. No I/O.

This module holds the order of the checks; the checks are in `fencing`, `bootstrap` and `dataloss`
(no round, or not the newest), `judging` (ended rounds), and one module for each state of a round.
`acts` writes for all of them; `coordinator` is the memory between two decisions.
"""

from __future__ import annotations

from typing import assert_never

from elasticjob_rendezvous.core import absence, bootstrap, dataloss, final, frozen, joinable
from elasticjob_rendezvous.core.acts import Act, Scene
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.events import Clock
from elasticjob_rendezvous.core.fencing import duplicates, fence_over
from elasticjob_rendezvous.core.judging import learn_of_preemption, pass_verdicts
from elasticjob_rendezvous.core.peers import gone_keys
from elasticjob_rendezvous.core.records import Member, RoundState
from elasticjob_rendezvous.core.view import Versioned, View


def decide(
    memory: Coordinator,
    view: View,
    own: Versioned[Member],
    clock: Clock,
    brought: Bounds | None = None,
) -> Act | None:
    """Return the next transaction, if one is due; `memory.timers.wake` is the time to look again.

    `own` is the coordinator's key, `brought` the bounds to write if no operator writes them.
    """
    timers, keys = memory.timers, view.keys
    timers.begin_step(clock.now)
    memory.awaited = 0
    if not view.malformed.keys().isdisjoint((keys.round, keys.bounds)):
        return None
    if view.bounds is None:
        return bootstrap.write_bounds(Scene(view, own, brought, clock), memory) if brought else None
    scene = Scene(view, own, view.bounds.record, clock)
    timers.since(absence.TOOK_OVER)
    fences = duplicates(view, own) + gone_keys(memory.peers, view.members())
    fences = [fence for fence in fences if fence.key != own.key]
    if fences:
        return fence_over(view, own, fences)
    if view.round is None:
        if view.known() == 0:
            return bootstrap.open_first(scene, memory)
        return dataloss.restore(scene, memory.timers, memory.last)
    return dataloss.overtake(scene, timers) or _in_round(memory, scene)


def _in_round(memory: Coordinator, scene: Scene) -> Act | None:
    """Return the action due in the current round, the newest that any member knows."""
    current, timers = scene.current, memory.timers
    timers.since(("state", current.number, current.state))
    if current.state is not RoundState.FROZEN and (
        act := pass_verdicts(scene, memory.peers, timers) or learn_of_preemption(scene)
    ):
        return act
    match current.state:
        case RoundState.JOINABLE:
            return joinable.next_act(scene, memory)
        case RoundState.FROZEN:
            return frozen.next_act(scene, memory)
        case RoundState.FINAL:
            return final.next_act(scene, memory)
        case RoundState.CLOSED:
            return None
        case _:
            assert_never(current.state)
