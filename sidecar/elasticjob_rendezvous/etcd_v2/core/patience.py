"""How long a member waits before it acts, so that members seldom get in each other's way. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elasticjob_rendezvous.etcd_v2.core.paths import rank_of
from elasticjob_rendezvous.etcd_v2.core.records import MalformedState, State, Status, read

_SLOT_SECONDS = 0.004
"""About what one compare-and-set takes, seen by the others included."""
_TURN_SECONDS = 0.02
"""After which a lower rank's turn to confirm is taken for missed."""
_CROWD = 4
_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 2.0


def after_conflict(conflicts: int, crowd: int, random: float) -> float:
    """Seconds until the next compare-and-set, after `conflicts` lost in a row.

    Some member wins each conflict, so that a crowd shrinks by itself: `crowd` is how many
    others there can be at most, and `random` in 0 … 1 spreads them.
    """
    return random * _SLOT_SECONDS * max(1, min(crowd, _CROWD * (1 << min(conflicts, 20))))


def before_confirming(unconfirmed_below: int) -> float:
    """Seconds that a member leaves to the lower ranks, who confirm first: no two at once."""
    return _TURN_SECONDS * unconfirmed_below


def after_failure(failures: int, random: float) -> float:
    """Seconds until etcd is asked again, after `failures` in a row."""
    longest = min(_LONGEST_RETRY_SECONDS, _RETRY_SECONDS * (1 << min(failures - 1, 10)))
    return longest * (0.5 + random / 2)


@dataclass(frozen=True, slots=True)
class Stay:
    """The version stands; look again when it changes, or after so long."""

    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """The version is over; destroy it, so that the next can be made."""

    reason: str


def verdict_on_final(
    state: State,
    alive: Collection[str],
    own: str | None,
    announced_seconds: float,
    notice_seconds: float,
) -> Stay | Free:
    """What a waiting member does about a final version.

    It is over when a member's key is missing, and when we were a member (`own` is our key)
    and are here. The members that still work look at `num_workers_waiting` in it, and so it
    stays for a notice before it goes, unless all that are alive are waiting anyway. Where
    nobody seems to be, all may just be coming back to an etcd that they could not reach.
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
    """The keys of a version's members, as etcd calls them."""
    return [_slashed(key) for key in state.keep_alives]


def missing_members(state: State, gone: Collection[str], version_path: str) -> list[str]:
    """Keys that members of an unfinished version had set, and that have run out."""
    keys = (f"{version_path}/rank_{rank}" for rank in state.participants)
    return [key for key in keys if key in gone]


def takes_part(text: str | None, keep_alive: str) -> bool:
    """Whether a member's key is of a participant of the version that `text` is."""
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
    """How many members wait for a version after `ours`, which is None before our first.

    Where ours was destroyed or overtaken, or a member of it is gone (`alive` holds the keys
    that are there, None: nobody looked), the answer is at least 1, so that who polls it
    comes back to the rendezvous too. `spare` of those who wait for ours are told of to nobody.
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
    """How many of those who wait for a version that is full are there for nothing.

    All members were there when it was made: who waited already, or came while it was `young`,
    has no place in the next one either. Who comes later may be the successor of one that died.
    """
    if len(state.participants) < greatest:
        return 0
    return state.waiting if young else min(before, state.waiting)


def moved_on(state: State | None, ours: str, alive: Collection[str] | None) -> bool:
    """Whether others of our version want a newer one, or have it: they were not done with ours.

    Who is done keeps its key. A version is destroyed only when a key of it is missing and
    somebody waits.
    """
    if state is None or state.version != ours:
        return state is None or state.status is not Status.CLOSED
    return state.status is Status.FINAL and state.waiting > 0 and is_lost(state, alive)


def is_lost(state: State, alive: Collection[str] | None) -> bool:
    """Whether a member of the version is gone, by the keys that are there."""
    return alive is not None and any(_slashed(key) not in alive for key in state.keep_alives)


def gone(state: State, alive: Collection[str] | None) -> frozenset[int]:
    """The ranks of a version whose keys are not there; none where nobody looked."""
    if alive is None:
        return frozenset()
    missing = (rank_of(key) for key in map(_slashed, state.keep_alives) if key not in alive)
    return frozenset(rank for rank in missing if rank is not None)


def _slashed(key: str) -> str:
    """etcd's own name of a key: torch writes what it was given."""
    return "/" + key.lstrip("/")
