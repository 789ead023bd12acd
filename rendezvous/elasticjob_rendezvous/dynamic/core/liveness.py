"""Failure detector of a node, based on its own monotonic clock. No I/O.

torch compares a heartbeat's timestamp, taken on another host, with the local wall clock. Here a
node is dead if its heartbeat has not changed for a timeout while we observed it. The end of the
last call is determined in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State


@dataclass(frozen=True, slots=True)
class Sighting:
    """Heartbeat, and the monotonic time since which we have seen it unchanged."""

    heartbeat: datetime
    since: float


@dataclass(frozen=True, slots=True)
class LastCall:
    """Last call of a round, and its end on our monotonic clock in seconds."""

    round: int
    deadline: datetime | None
    ends: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Observations of the other nodes. `at` is the time of the last one."""

    at: float = float("-inf")
    sightings: Mapping[NodeDesc, Sighting] = field(default_factory=dict)
    last_call: LastCall | None = None


def observe(
    memory: Memory, state: State, settings: RendezvousSettings, now: float, utc: datetime
) -> Memory:
    """Update the observations with a newly read state.

    After a gap (this process was suspended, or the store was unavailable and no node could
    write), every silence counts from `now`.
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
    """Return the nodes whose heartbeat has not changed within the timeout."""
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
        if not 0 < left <= longest:  # the clocks of the two nodes differ
            left = longest
    return LastCall(state.round, state.deadline, now + left)
