"""Failure detector of a node, based on its own monotonic clock. No I/O.

torch compares a heartbeat's timestamp, taken on another host, with the local wall clock. Here a
node is dead if its heartbeat has not changed for a timeout while we observed it. The end of the
last call is determined in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State

MAX_LEFT_OUT = 3
"""Maximum number of waits, and of gaps, that do not count in the silence after one heartbeat: a
store that is always slow must not hide a dead node for ever."""
SHORT_WAIT = 0.1
"""Fraction of an interval up to which the wait for an answer counts as silence."""
MIN_PAUSE = 0.1
"""Minimum pause before the next heartbeat, as a fraction of an interval."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """Heartbeat, and the monotonic time since which we have seen it unchanged.

    `since` is later by the waits and gaps that do not count as silence.

    Args:
        waits: number of our waits for the store that it leaves out.
        gaps: number of gaps in our observation that it leaves out.
    """

    heartbeat: datetime
    since: float
    waits: int = 0
    gaps: int = 0


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
    memory: Memory,
    state: State,
    settings: RendezvousSettings,
    now: float,
    utc: datetime,
    asked: float | None = None,
) -> Memory:
    """Update the observations with a newly read state.

    Other nodes may have waited for the store as this one did. Such a wait does not count as their
    silence, nor does a gap in our observation (this process was suspended). Up to MAX_LEFT_OUT of
    either are left out.

    Args:
        asked: monotonic time of the first request since the last answer; None: `now`.
    """
    patience = min(2 * settings.interval_seconds, settings.dead_after_seconds)
    waited = 0.0 if asked is None else now - asked
    gap = now - memory.at > patience
    late = not gap and waited > SHORT_WAIT * settings.interval_seconds
    sightings = {}
    for node, heartbeat in state.last_heartbeats.items():
        seen = memory.sightings.get(node)
        if seen is None or seen.heartbeat != heartbeat:
            seen = Sighting(heartbeat, now)
        elif gap and seen.gaps < MAX_LEFT_OUT:
            seen = replace(seen, since=now, gaps=seen.gaps + 1)
        elif late and seen.waits < MAX_LEFT_OUT:
            seen = replace(seen, since=min(now, seen.since + waited), waits=seen.waits + 1)
        sightings[node] = seen
    return Memory(now, sightings, _last_call(memory.last_call, state, settings, now, utc))


def dead(memory: Memory, settings: RendezvousSettings) -> frozenset[NodeDesc]:
    """Return the nodes whose heartbeat has not changed within the timeout."""
    oldest = memory.at - settings.dead_after_seconds
    return frozenset(n for n, seen in memory.sightings.items() if seen.since < oldest)


def pause_seconds(settings: RendezvousSettings, now: float, beat_at: float, listed: bool) -> float:
    """Return the pause before our next heartbeat.

    It is measured from the last written one: after a heartbeat that failed or was late, the others
    have no further interval of patience.

    Args:
        beat_at: monotonic time of our last written heartbeat.
        listed: True if the state has a heartbeat of ours.
    """
    interval = settings.interval_seconds
    if not listed:
        return interval
    return min(interval, max(MIN_PAUSE * interval, interval - (now - beat_at)))


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
