"""How the first round comes about, and outside Kubernetes the bounds before it. Pure."""

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
"""How long the members of a large job may take to come before its first round opens."""
FIRST = Round(1, RoundState.JOINABLE, Cause(CauseKind.START))


def write_bounds(scene: Scene, memory: Coordinator) -> Act | None:
    """Outside Kubernetes the first member writes the bounds, with the first round if it can."""
    keys = scene.view.keys
    put = Put(keys.bounds, encode(scene.bounds))
    none = Compare(keys.bounds, Target.CREATE, 0)
    if scene.view.round is None and scene.view.known() == 0:
        return open_first(scene, memory, (put,), (none,))
    compares = (none, held(scene.own))
    return Act(Txn(compares, (put,), (Range(keys.bounds),)), "the bounds are written")


def open_first(
    scene: Scene,
    memory: Coordinator,
    ops: tuple[Op, ...] = (),
    compares: tuple[Compare, ...] = (),
) -> Act | None:
    """Round 1: with the question to its members, if enough are waiting already.

    Whatever is written wakes every member. So a crowd is given a moment to be all there.
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
