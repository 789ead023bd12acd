"""First round of a job and, outside Kubernetes, the write of the bounds before it. No I/O."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.coordinator import quorum
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    held,
    write_round,
)
from elasticjob_rendezvous.protocol.kv import Compare, Op, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Round, RoundState

LARGE_GANG = 16
LARGE_GANG_SECONDS = 0.25
"""Time for the members of a large job to register before its first round opens."""
FIRST = Round(1, RoundState.JOINABLE, Cause(CauseKind.START))


def write_bounds(snapshot: Snapshot, memory: Coordinator) -> RoundUpdate | None:
    """Write the bounds as the first member outside Kubernetes, with the first round if possible."""
    keys = snapshot.view.keys
    put = Put(keys.bounds, encode(snapshot.bounds))
    none = Compare(keys.bounds, Target.CREATE, 0)
    if snapshot.view.round is None and snapshot.view.known() == 0:
        return open_first(snapshot, memory, (put,), (none,))
    compares = (none, held(snapshot.own))
    return RoundUpdate(Txn(compares, (put,), (Range(keys.bounds),)), "bounds written")


def open_first(
    snapshot: Snapshot,
    memory: Coordinator,
    ops: tuple[Op, ...] = (),
    compares: tuple[Compare, ...] = (),
) -> RoundUpdate | None:
    """Open round 1, frozen at once if enough members are waiting already.

    Every write wakes all members, so the members of a large job get a moment to register first.
    """
    bounds, timers = snapshot.bounds, memory.timers
    timers.since(("state", 1, RoundState.JOINABLE))
    timers.since(("stopped", 1))
    count = quorum.group_members(snapshot.view.members(), 0, None, bounds, ())
    choice = quorum.choose(count, bounds, 0, last_call_over=False)
    if isinstance(choice, quorum.Freeze) and not count.unstopped:
        frozen = replace(FIRST, state=RoundState.FROZEN, ids=choice.ids)
        note = f"round 1 opens, frozen with {len(choice.ids)} members"
        return write_round(snapshot, frozen, note, ops, compares)
    memory.awaited = max(0, bounds.wanted - len(count.waiting))
    is_large = bounds.min_nodes >= LARGE_GANG
    if is_large and not timers.over("first round", LARGE_GANG_SECONDS):
        return None
    return write_round(snapshot, FIRST, "round 1 opens", ops, compares)
