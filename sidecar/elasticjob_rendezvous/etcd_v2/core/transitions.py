"""What a member writes next, given the state it read: the text and the time to live.

A compare-and-set without a ttl clears the ttl, so every `Write` says which it wants.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.etcd_v2.core.paths import rank_of
from elasticjob_rendezvous.etcd_v2.core.records import (
    FROZEN_TTL_SECONDS,
    JOINABLE_TTL_SECONDS,
    SETUP_TTL_SECONDS,
    State,
    Status,
    printed,
)


@dataclass(frozen=True, slots=True)
class Write:
    """The next value of `active_version`; no ttl: it stays."""

    state: State
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Destroy:
    """Delete `active_version`: its version can no longer come about."""


@dataclass(frozen=True, slots=True)
class Joined:
    write: Write
    rank: int


class NoSpace(ValueError):
    """A joinable version is full: the members disagree about their greatest number."""


def set_up() -> Write:
    """The first sign of a new version; it goes by itself if its maker dies."""
    return Write(printed({"status": "setup"}), SETUP_TTL_SECONDS)


def opened(version: str) -> Write:
    return Write(printed({"status": "joinable", "version": version, "participants": []}))


def joined(state: State, smallest: int, greatest: int) -> Joined:
    """One more participant. Raises NoSpace."""
    participants = state.participants
    rank = len(participants)
    if rank >= greatest:
        raise NoSpace(
            f"version {state.version} has {rank} participants, and this member's max is {greatest};"
            " every member must be given the same min and max"
        )
    grown = printed({**state.fields, "participants": [*participants, rank]})
    if rank + 1 == greatest:
        return Joined(frozen(grown), rank)
    ttl = JOINABLE_TTL_SECONDS if rank + 1 >= smallest else None
    return Joined(Write(grown, ttl), rank)


def frozen(state: State) -> Write:
    """Nobody else may join."""
    fields = {**state.fields, "status": "frozen", "keep_alives": []}
    return Write(printed(fields), FROZEN_TTL_SECONDS)


def held(state: State) -> Write:
    """The same for another while: the last call goes on."""
    return Write(state, JOINABLE_TTL_SECONDS)


def confirmed(state: State, keep_alive: str) -> Write | None:
    """One more confirmation, the last of which makes it final; None: ours is in already."""
    keep_alives = state.keep_alives
    if keep_alive in keep_alives:
        return None
    keep_alives.append(keep_alive)
    fields = {**state.fields, "keep_alives": keep_alives}
    if len(keep_alives) < len(state.participants):
        return Write(printed(fields), FROZEN_TTL_SECONDS)
    return Write(printed({**fields, "status": "final", "num_workers_waiting": 0}))


def announced(state: State) -> Write:
    """One more waits for the next version."""
    return Write(printed({**state.fields, "num_workers_waiting": state.waiting + 1}))


def retracted(state: State) -> Write | None:
    """One fewer waits; None where nobody does."""
    if not state.waiting:
        return None
    return Write(printed({**state.fields, "num_workers_waiting": state.waiting - 1}))


def closed(state: State | None) -> Write | None:
    """No version will come any more; None: it is so already."""
    if state is None:
        return Write(printed({"status": "closed"}))
    if state.status is Status.CLOSED:
        return None
    return Write(printed({**state.fields, "status": "closed"}))


def withdrawn(state: State, version: str, rank: int, smallest: int) -> Write | Destroy | None:
    """A member that joined leaves before the version is final; None: it concerns us no more.

    Ranks are places in a row, so that only the last to join can be taken out. Any other
    place would stay empty until a ttl says so: better that all join again at once.
    """
    if state.version != version or state.status not in (Status.JOINABLE, Status.FROZEN):
        return None
    participants = state.participants
    if rank not in participants:
        return None
    if state.status is Status.JOINABLE and participants[-1] == rank:
        fewer = printed({**state.fields, "participants": participants[:-1]})
        ttl = JOINABLE_TTL_SECONDS if len(participants) - 1 >= smallest else None
        return Write(fewer, ttl)
    return Destroy()


def unconfirmed_below(state: State, rank: int) -> int:
    """How many ranks below `rank` have not confirmed."""
    done = {rank_of(key) for key in state.keep_alives}
    return sum(1 for other in range(rank) if other not in done)
