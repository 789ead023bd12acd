"""Transitions of `active_version`: the next state and its time to live; errors under torch's names
for one that is not possible. No I/O.

A compare-and-set without a ttl clears the ttl, so every `Write` specifies one.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.etcd_v2.core.records import (
    FROZEN_TTL_SECONDS,
    JOINABLE_TTL_SECONDS,
    SETUP_TTL_SECONDS,
    State,
    Status,
    printed,
    rank_of,
)


class EtcdRendezvousRetryableFailure(Exception):
    """Transition that is no longer or not yet possible: start again after a short pause."""


class EtcdRendezvousRetryImmediately(Exception):
    """Transition that is no longer possible; the state read allows an immediate restart."""


@dataclass(frozen=True, slots=True)
class Write:
    """Next value of `active_version`; permanent without a ttl."""

    state: State
    ttl_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Destroy:
    """Deletion of `active_version`: its version can no longer complete."""


@dataclass(frozen=True, slots=True)
class Joined:
    write: Write
    rank: int


class NoSpace(ValueError):
    """Joinable version that is already full: the members have different maximum sizes."""


def set_up() -> Write:
    """Return the initial state of a new version; it expires if its creator dies."""
    return Write(printed({"status": "setup"}), SETUP_TTL_SECONDS)


def opened(version: str) -> Write:
    return Write(printed({"status": "joinable", "version": version, "participants": []}))


def joined(state: State, smallest: int, greatest: int) -> Joined:
    """Add one participant. Raises NoSpace."""
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
    """Freeze the version: no further joins."""
    fields = {**state.fields, "status": "frozen", "keep_alives": []}
    return Write(printed(fields), FROZEN_TTL_SECONDS)


def held(state: State) -> Write:
    """Renew the time to live of an unchanged state during the last call."""
    return Write(state, JOINABLE_TTL_SECONDS)


def confirmed(state: State, keep_alive: str) -> Write | None:
    """Add a confirmation; the last one makes the version final. None if it is already present."""
    keep_alives = state.keep_alives
    if keep_alive in keep_alives:
        return None
    keep_alives.append(keep_alive)
    fields = {**state.fields, "keep_alives": keep_alives}
    if len(keep_alives) < len(state.participants):
        return Write(printed(fields), FROZEN_TTL_SECONDS)
    return Write(printed({**fields, "status": "final", "num_workers_waiting": 0}))


def announced(state: State) -> Write:
    """Increment the number of waiting members."""
    return Write(printed({**state.fields, "num_workers_waiting": state.waiting + 1}))


def retracted(state: State) -> Write | None:
    """Decrement the number of waiting members; None if it is 0."""
    if not state.waiting:
        return None
    return Write(printed({**state.fields, "num_workers_waiting": state.waiting - 1}))


def closed(state: State | None) -> Write | None:
    """Close the run; None if it is already closed."""
    if state is None:
        return Write(printed({"status": "closed"}))
    if state.status is Status.CLOSED:
        return None
    return Write(printed({**state.fields, "status": "closed"}))


def withdrawn(state: State, version: str, rank: int, smallest: int) -> Write | Destroy | None:
    """Remove a member that leaves before the version is final; None if it is not affected.

    Ranks are consecutive, so only the last member to join can be removed. The rank of any other
    would remain vacant until a ttl expires, so the version is destroyed and all join again at once.
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
    """Return the number of ranks below `rank` that have not confirmed."""
    done = {rank_of(key) for key in state.keep_alives}
    return sum(1 for other in range(rank) if other not in done)
