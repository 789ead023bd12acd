"""Who lives, by what this node has seen on its own monotonic clock.

The reference compares a heartbeat's time, taken on another host, with its own wall clock.
Here a node is dead when its heartbeat has not changed for long enough while we looked.
The end of the last call is judged the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import State


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat, and since when (monotonic seconds) we have seen it unchanged."""

    heartbeat: datetime
    since: float


@dataclass(frozen=True, slots=True)
class LastCall:
    """The last call of a round, and when it ends on our clock (monotonic seconds)."""

    round: int
    deadline: datetime | None
    ends: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What this node has seen of the others. `at` is when it last looked."""

    at: float = float("-inf")
    sightings: Mapping[NodeDesc, Sighting] = field(default_factory=dict)
    last_call: LastCall | None = None


def observe(
    memory: Memory, state: State, settings: RendezvousSettings, now: float, utc: datetime
) -> Memory:
    """What is known after a look at the state.

    After a gap (we were paused, or the store was away and nobody could write) every silence
    counts from now.
    """
    patience = min(2 * settings.interval_seconds, settings.dead_after_seconds)
    known = memory.sightings if now - memory.at <= patience else {}
    sightings = {}
    for node, heartbeat in state.last_heartbeats.items():
        seen = known.get(node)
        if seen is None or seen.heartbeat != heartbeat:
            seen = Sighting(heartbeat, now)
        sightings[node] = seen
    return Memory(now, sightings, _last_call(memory.last_call, state, settings, now, utc))


def dead(memory: Memory, settings: RendezvousSettings) -> frozenset[NodeDesc]:
    """The nodes that have been silent for too long."""
    oldest = memory.at - settings.dead_after_seconds
    return frozenset(n for n, seen in memory.sightings.items() if seen.since < oldest)


def _last_call(
    known: LastCall | None,
    state: State,
    settings: RendezvousSettings,
    now: float,
    utc: datetime,
) -> LastCall | None:
    if state.complete or len(state.participants) < settings.min_nodes:
        return None
    if known is not None and (known.round, known.deadline) == (state.round, state.deadline):
        return known
    longest = settings.last_call(state.round).total_seconds()
    left = longest
    if state.deadline is not None:
        left = (state.deadline - utc).total_seconds()
        if not 0 < left <= longest:  # the clock that set it is not ours
            left = longest
    return LastCall(state.round, state.deadline, now + left)
