"""Delays and decisions of waiting members, chosen to keep conflicts rare. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from elasticjob_rendezvous.etcd_v2.core.records import MalformedState, State, Status, rank_of, read

_SLOT_SECONDS = 0.004
"""Approximate duration of a compare-and-set until the other members see it."""
_TURN_SECONDS = 0.02
"""Time for each lower rank to confirm first."""
_FIRST_COMPETITORS = 4
_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 2.0


def after_conflict(conflicts: int, competitors: int, random: float) -> float:
    """Return the delay before the next compare-and-set, after `conflicts` failures in a row.

    One member wins each conflict, so the number of competitors decreases: `competitors` is their
    maximum number, and `random` in 0 … 1 spreads them.
    """
    return (
        random
        * _SLOT_SECONDS
        * max(1, min(competitors, _FIRST_COMPETITORS * (1 << min(conflicts, 20))))
    )


def before_confirming(unconfirmed_below: int) -> float:
    """Return the delay before a confirmation: lower ranks confirm first, one at a time."""
    return _TURN_SECONDS * unconfirmed_below


def after_failure(failures: int, random: float) -> float:
    """Return the delay before the next request to etcd, after `failures` in a row."""
    longest = min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * (1 << min(failures - 1, 10)))
    return longest * (0.5 + random / 2)


def after_failed_renewal(ttl_seconds: float, random: float) -> float:
    """Return the delay before the next renewal of a key with this time to live."""
    return min(1.0, ttl_seconds / 20) * (0.5 + random)


@dataclass(frozen=True, slots=True)
class Retries:
    """Delays in seconds before requests to etcd are repeated.

    Args:
        watch: delay of the watch, from the number of failures in a row and a random number in
            0 … 1.
        renewal: delay of a renewal, from the key's time to live and a random number in 0 … 1.
    """

    watch: Callable[[int, float], float] = after_failure
    renewal: Callable[[float, float], float] = after_failed_renewal


@dataclass(frozen=True, slots=True)
class Stay:
    """Verdict that the version remains; check again on a change, or after `seconds`."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """Verdict that the version is over: destroy it, so that the next one can be created."""

    reason: str


def verdict_on_final(
    state: State,
    alive: Collection[str],
    own: str | None,
    announced_seconds: float,
    notice_seconds: float,
) -> Stay | Free:
    """Decide if a waiting member keeps or destroys a final version.

    The version is over if a member's key is missing, or if we are a member (`own` is our key)
    and wait again. Its working members poll `num_workers_waiting`, so it is kept for
    `notice_seconds`, unless all living members are already waiting. If no member seems alive, this
    means all members, since they may be reconnecting after an outage of etcd.
    """
    keys = keys_of(state)
    missing = [key for key in keys if key not in alive]
    if own in keys and own not in missing:
        reason = f"{own} has come back"
    elif missing:
        reason = f"{missing[0]} is not renewed"
    else:
        return Stay()
    if state.waiting >= (len(keys) - len(missing) or len(keys)):
        return Free(reason)
    left = notice_seconds - announced_seconds
    return Free(reason) if left <= 0 else Stay(left)


def keys_of(state: State) -> list[str]:
    """Return the keys of a version's members, in etcd's form."""
    return [_slashed(key) for key in state.keep_alives]


def missing_members(state: State, gone: Collection[str], version_path: str) -> list[str]:
    """Return the expired or deleted keys of participants of an unfinished version."""
    keys = (f"{version_path}/rank_{rank}" for rank in state.participants)
    return [key for key in keys if key in gone]


def takes_part(text: str | None, keep_alive: str) -> bool:
    """Return True if a keep-alive key belongs to a participant of the version in `text`."""
    try:
        state = read(text)
    except MalformedState:
        return False
    rank = rank_of(keep_alive)
    return rank in state.participants and keep_alive.endswith(f"/v_{state.version}/rank_{rank}")


def nodes_waiting(
    state: State | None,
    ours: str | None,
    alive: Collection[str] | None = None,
    spare: int = 0,
) -> int:
    """Return the number of members that wait for a version after `ours` (None before our first).

    At least 1 if ours was destroyed or superseded, or if one of its members is gone, so that a
    polling agent returns to the rendezvous. `alive` holds the existing keys, None if unknown.
    `spare` of the members that wait for the end of ours are not counted.
    """
    if state is None or state.status is Status.SETUP:
        return 0 if ours is None else 1
    if state.status is Status.CLOSED:
        return 0
    if state.version != ours:
        if state.status is Status.FINAL:
            return max(state.waiting, 0 if ours is None else 1)
        return 0 if ours is None else max(1, len(state.participants))
    return max(state.waiting - spare, int(is_lost(state, alive)))


def spare_nodes(state: State, greatest: int, before: int, young: bool) -> int:
    """Return the number of members that wait for a full version without prospect of a rank.

    Members that waited when the version was created, or came while it was `young`, would have no
    rank in the next version either. A later one may be the successor of a member that died.
    """
    if len(state.participants) < greatest:
        return 0
    return state.waiting if young else min(before, state.waiting)


def moved_on(state: State | None, ours: str, alive: Collection[str] | None) -> bool:
    """Return True if members of our version, not finished with it, want or have a newer one.

    A finished member keeps its key. A version is destroyed only if one of its keys is missing and
    a member waits.
    """
    if state is None or state.version != ours:
        return state is None or state.status is not Status.CLOSED
    return state.status is Status.FINAL and state.waiting > 0 and is_lost(state, alive)


def is_lost(state: State, alive: Collection[str] | None) -> bool:
    """Return True if a member of the version has no key in `alive`; False if that is None."""
    return alive is not None and any(_slashed(key) not in alive for key in state.keep_alives)


def gone(state: State, alive: Collection[str] | None) -> frozenset[int]:
    """Return the ranks of a version whose keys are missing; none if `alive` is None."""
    if alive is None:
        return frozenset()
    missing = (rank_of(key) for key in map(_slashed, state.keep_alives) if key not in alive)
    return frozenset(rank for rank in missing if rank is not None)


def _slashed(key: str) -> str:
    """Return a key in etcd's form, with a leading slash; torch may write it without one."""
    return "/" + key.lstrip("/")
