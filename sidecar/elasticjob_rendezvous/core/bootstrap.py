"""First round of a job and, outside Kubernetes, the write of the bounds before it. No I/O."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core import census
from elasticjob_rendezvous.core.acts import Act, Scene, held, write_round
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.kv import Compare, Op, Put, Range, Target, Txn
from elasticjob_rendezvous.core.records import Cause, CauseKind, Round, RoundState

CROWD = 16
CROWD_SECONDS = 0.25
"""Time for the members of a large job to register before its first round opens."""
FIRST = Round(1, RoundState.JOINABLE, Cause(CauseKind.START))


def write_bounds(scene: Scene, memory: Coordinator) -> Act | None:
    """Write the bounds as the first member outside Kubernetes, with the first round if possible."""
    keys = scene.view.keys
    put = Put(keys.bounds, encode(scene.bounds))
    none = Compare(keys.bounds, Target.CREATE, 0)
    if scene.view.round is None and scene.view.known() == 0:
        return open_first(scene, memory, (put,), (none,))
    compares = (none, held(scene.own))
    return Act(Txn(compares, (put,), (Range(keys.bounds),)), "bounds written")


def open_first(
    scene: Scene,
    memory: Coordinator,
    ops: tuple[Op, ...] = (),
    compares: tuple[Compare, ...] = (),
) -> Act | None:
    """Open round 1, frozen at once if enough members are waiting already.

    Every write wakes all members, so the members of a large job get a moment to register first.
    """
    bounds, timers = scene.bounds, memory.timers
    timers.since(("state", 1, RoundState.JOINABLE))
    timers.since(("stopped", 1))
    count = census.take(scene.view.members(), 0, None, bounds, ())
    choice = census.choose(count, bounds, 0, last_call_over=False)
    if isinstance(choice, census.Freeze) and not count.unstopped:
        frozen = replace(FIRST, state=RoundState.FROZEN, ids=choice.ids)
        note = f"round 1 opens, frozen with {len(choice.ids)} members"
        return write_round(scene, frozen, note, ops, compares)
    memory.awaited = max(0, bounds.wanted - len(count.waiting))
    crowd = bounds.min_nodes >= CROWD
    if crowd and not timers.over("first round", CROWD_SECONDS):
        return None
    return write_round(scene, FIRST, "round 1 opens", ops, compares)
