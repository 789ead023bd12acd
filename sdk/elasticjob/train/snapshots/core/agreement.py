"""Decisions about snapshots: when to take one, where to write it, which one to load. No I/O.

A snapshot consists of a shared part, with the state that is the same on all ranks, and optionally
an own part of each rank. All parts of a version were written in the same step by the same gang.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHARED = -1
"""Rank of the shared part."""
MEMORY = "memory"
REPLICAS = "replicas"
STORAGE = "storage"
PLACES = (MEMORY, REPLICAS, STORAGE)
"""Places of parts, in the order in which they are read."""

_RESHARDS = 1 << 31
"""Bit of the number of ranks in a record: any number of ranks can load the parts."""
_AT_STOP = 1 << 30
"""Bit of the number of ranks in a record: the shared part is a stop copy."""


class SnapshotError(Exception):
    """Snapshot that could not be stored or restored; the message has the rank and the cause.

    Attributes:
        is_of_calls: True if the ranks have made different calls, or with different values.
    """

    __module__ = "elasticjob.train"  # the name in tracebacks is the one that scripts import
    is_of_calls = False


class RankEndedError(SnapshotError):
    """Error of a rank that waited for another one whose process has ended.

    The agent recognizes the class by its name, and attributes the failure to the lost peer.
    """

    __module__ = "elasticjob.train"


class Missing(enum.IntFlag):
    """Places where this rank lacks its parts of the last snapshot, as the ranks exchange them."""

    MEMORY = 1
    STORAGE = 2
    CHANGED = 4
    """Cause: something other than the optimizers has changed the state during its copy."""


class Version(NamedTuple):
    """Identity of a snapshot. Versions are ordered by their steps.

    Args:
        step: number of completed steps.
        gang: number from `next_gang` that the ranks of one round share. Two rounds may both
            complete a step; their parts are never combined.
    """

    step: int
    gang: int


class Part(NamedTuple):
    """Part of a snapshot.

    Args:
        rank: rank that the part belongs to, or `SHARED`.
        ranks: number of ranks with a part of their own in this version; 0 if there are none.
        before: step of the gang's previous snapshot, or the step at which the gang began; for a
            stop copy its step less the interval, which may be negative.
        reshards: True if any number of ranks can load the ranks' own parts together.
        at_stop: True if the shared part is a stop copy, between two regular snapshots.
    """

    version: Version
    rank: int
    ranks: int
    before: int
    reshards: bool = False
    at_stop: bool = False


def fields_of(part: Part) -> tuple[int, int, int, int, int]:
    """Return the fields of a part in records: step, gang, rank, number of ranks, step before."""
    ranks = part.ranks | (_RESHARDS if part.reshards else 0) | (_AT_STOP if part.at_stop else 0)
    return *part.version, part.rank, ranks, part.before


def part_of(step: int, gang: int, rank: int, ranks: int, before: int) -> Part:
    """Return the part with these fields of a record."""
    flags = bool(ranks & _RESHARDS), bool(ranks & _AT_STOP)
    return Part(Version(step, gang), rank, ranks & ~(_RESHARDS | _AT_STOP), before, *flags)


class Offer(NamedTuple):
    """Committed parts that one rank can read, by place.

    `memory` has the parts of its own node, `replicas` the copies of parts of other nodes.
    """

    memory: tuple[Part, ...] = ()
    replicas: tuple[Part, ...] = ()
    storage: tuple[Part, ...] = ()

    def at(self, place: str) -> tuple[Part, ...]:
        return self[PLACES.index(place)]


class Source(NamedTuple):
    """Ranks that read a part from `place`; the first one sends it to the ranks that cannot."""

    place: str
    part: Part
    readers: tuple[int, ...]


class Plan(NamedTuple):
    """Snapshot to load, with the source of each part.

    `own` is indexed by the rank that wrote the part; it is empty if no own parts are loaded.
    """

    shared: Source
    own: tuple[Source, ...] = ()

    @property
    def version(self) -> Version:
        return self.shared.part.version


def next_gang(offers: Sequence[Offer], random_bits: int) -> int:
    """Return the number of a new gang: higher than those in the offers, and unique.

    Of two versions of one step the later is the newest: its gang has the version before it too.
    """
    latest = max((part.version.gang >> 32 for part in _all(offers)), default=0)
    return (latest + 1) << 32 | random_bits & 0xFFFFFFFF


def decide(offers: Sequence[Offer], is_sharded: bool = False) -> Plan | None:
    """Return the snapshot that all ranks load, from the offer of each rank; None without any.

    The newest version wins. It may lack the own parts of some ranks, if a writer ended between two
    parts. Then the previous version is preferred if it is complete, but none before that one:
    losing the ranks' own state costs less than repeating more steps. Stop copies are not counted
    as the previous version, since they lie between the regular snapshots. Sharded state is useless
    without the parts of all ranks: the newest complete version wins, however old it is.
    """
    shared = {part for part in _all(offers) if part.rank == SHARED}
    if not shared:
        return None
    newest = max(shared)
    candidates = sorted(shared, reverse=True) if is_sharded else _not_older(newest, shared)
    for part in candidates:
        source, own = _source(part, offers), _own_sources(part, offers)
        if source is not None and own is not None:
            return Plan(source, own)
    source = None if is_sharded else _source(newest, offers)
    return None if source is None else Plan(source)


def version_after(
    plan: Plan | None, offers: Sequence[Offer], is_sharded: bool = False
) -> Version | None:
    """Return the version that the ranks load if that of a plan is damaged; None without one."""
    if plan is None:
        return None
    left = [
        Offer(*(tuple(each for each in parts if each.version != plan.version) for parts in offer))
        for offer in offers
    ]
    found = decide(left, is_sharded)
    return None if found is None else found.version


def sizes_of(offers: Sequence[Offer]) -> set[int]:
    """Return the numbers of ranks that could load the own parts of any version in the offers.

    Versions that any number of ranks can load are omitted.
    """
    shared = (part for part in _all(offers) if part.rank == SHARED)
    return {part.ranks for part in shared if part.ranks and not part.reshards}


def interval_before(plan: Plan | None, offers: Sequence[Offer]) -> int:
    """Return the number of steps between the snapshot to load and the one before it; 1 if unknown.

    A stop copy records the interval itself. A gang that restored nothing counts from step 0, but
    its script may have continued another checkpoint at any step: the steps up to its first snapshot
    are not an interval. The shorter of the last two intervals counts, because the longer one may
    include such a jump.
    """
    if plan is None:
        return 1
    newest = plan.shared.part
    steps = () if newest.at_stop else (newest.version.step, newest.before)
    found = {part for part in _all(offers) if part.rank == SHARED and part.version.step in steps}
    intervals = [
        part.version.step - part.before
        for part in found | {newest}
        if part.at_stop or part.before > 0
    ]
    return min((each for each in intervals if each > 0), default=1)


def next_regular(step: int, interval: int, due: int) -> int:
    """Return the step of the first regular snapshot after a restore.

    A restart does not postpone it: if faults were closer together than the interval, there would be
    no regular snapshot, and none in storage.

    Args:
        due: step at which the previous workers would have taken it; in the past if unknown.
    """
    return due if step < due < step + interval else step + interval


def are_incomplete_at_stop(plan: Plan, offers: Sequence[Offer]) -> bool:
    """Return True if there is a stop copy newer than the plan's version.

    The plan skips it because the own part of a rank is missing.
    """
    return any(
        part.at_stop and part.rank == SHARED and part.version > plan.version
        for part in _all(offers)
    )


def _all(offers: Sequence[Offer]) -> Iterable[Part]:
    return (part for offer in offers for place in PLACES for part in offer.at(place))


def _not_older(newest: Part, shared: Iterable[Part]) -> list[Part]:
    """Return `newest` and the snapshot before it, newest first.

    A snapshot of a later gang that began without `newest` also counts as a previous one. If
    `newest` is a stop copy, the next version counts as the newest snapshot.
    """
    others = set(shared) - {newest}
    if newest.at_stop and others:
        return [newest, *_not_older(max(others), others)]
    older = [part for part in others if part.version.step >= newest.before]
    return [newest, *sorted(older, reverse=True)]


def _own_sources(shared: Part, offers: Sequence[Offer]) -> tuple[Source, ...] | None:
    """Return the source of each rank's part; None if some are missing or the size differs."""
    if not shared.ranks:
        return ()
    if shared.ranks != len(offers) and not shared.reshards:
        return None
    found = []
    for rank in range(shared.ranks):
        source = _source(shared._replace(rank=rank), offers, rank)
        if source is None:
            return None
        found.append(source)
    return tuple(found)


def _source(part: Part, offers: Sequence[Offer], preferred: int = SHARED) -> Source | None:
    """Return the ranks that hold the part, memory first; a part of one rank has one reader."""
    for place in PLACES:
        readers = [rank for rank, offer in enumerate(offers) if part in offer.at(place)]
        if readers and part.rank != SHARED:
            # The parts of further ranks are spread over all that can read them.
            at = part.rank % len(readers)
            readers = [preferred] if preferred in readers else [readers[at]]
        elif place == STORAGE:
            readers = readers[:1]  # a shared file system is read once
        if readers:
            return Source(place, part, tuple(readers))
    return None


def buffer_to_overwrite(held: Sequence[Part | None], keep: Part | None) -> int:
    """Return the index of the buffer for the next part: an empty one, else one without `keep`.

    `keep` is the part that was committed or restored last. It stays until the next is committed.
    """
    for index, part in enumerate(held):
        if part is None:
            return index
    for index, part in enumerate(held):
        if part != keep:
            return index
    return 0  # all buffers hold copies of `keep`


def buffer_ahead(held: Sequence[Part | None], keep: Version | None) -> int:
    """Return the index of the buffer for a part that is being received.

    Args:
        keep: version that the ranks load if this one is damaged. A node without it keeps its newest
            one, since the nodes that have it may be lost meanwhile.
    """
    there = [part for part in held if part is not None]
    newest = max(there, default=None)
    kept = next((part for part in there if part.version == keep), newest)
    return buffer_to_overwrite(held, kept)


def buffer_at_stop(held: Sequence[Part | None], part: Part, keep: Version) -> int | None:
    """Return the index of the buffer for a stop copy; None if it must not be written.

    The gang's ranks may be a step apart, so another rank may have written the same step or a newer
    one. Unlike `buffer_to_overwrite` this depends on the buffers alone, not on this process.

    Args:
        keep: newest version of all ranks; without it the newest part is kept.
    """
    there = [each for each in held if each is not None]
    version = part.version
    if any(each.version.gang == version.gang and each.version >= version for each in there):
        return None
    kept = next((each for each in there if each.version == keep), None)
    return buffer_to_overwrite(held, kept or max(there, default=None))


def part_at_stop(version: Version, interval: int, ranks: int = 0) -> Part:
    """Return the shared part of a stop copy. Its `before` is its step less the interval.

    The step of the last snapshot would be wrong there: `interval_before` would propose the steps
    since then. `before` is negative if the interval is longer than the training so far.

    Args:
        ranks: number of ranks with a state of their own.
    """
    return Part(version, SHARED, ranks, version.step - interval, at_stop=True)


def has_own_parts(shared: Part, there: Iterable[Part], local_ranks: int) -> bool:
    """Return True if a node has the own parts of all its ranks that belong to a shared part.

    Ranks may be a step apart at a stop. A rank that still holds the state of a step has not written
    its own part of the next step. The check thus prevents the node from replacing a version that
    may be complete by one that cannot be.

    Args:
        there: parts on the node.
        local_ranks: number of ranks on the node; 0 if it is unknown.
    """
    found = {part.rank for part in there if part.rank != SHARED and is_of(part, shared)}
    return not shared.ranks or len(found) >= max(1, local_ranks)


def is_of(own: Part, shared: Part) -> bool:
    """Return True if the own part of a rank and a shared part are of the same version."""
    return own._replace(rank=SHARED) == shared


def steps_between(every_seconds: float, steps: int, seconds: float) -> int:
    """Return the number of steps until the next snapshot, after `steps` steps took `seconds`."""
    if seconds <= 0 or steps <= 0:
        return 1
    return max(1, math.ceil(every_seconds * steps / seconds))


def steps_within(overhead: float, cost_seconds: float, step_seconds: float) -> int:
    """Return the smallest interval in steps at which a snapshot of that cost keeps the overhead.

    Args:
        overhead: largest share of the steps' time, such as 0.01.
    """
    if step_seconds <= 0:
        return 1
    return max(1, math.ceil(cost_seconds / (overhead * step_seconds)))


def steps_at_faults(
    between_seconds: float, cost_seconds: float, step_seconds: float, overhead: float
) -> int:
    """Return the interval in steps with the shortest sum of snapshots and repeated steps.

    A fault repeats half an interval on average. The sum is shortest where the snapshots between two
    faults take as long as that (Young, 1974).

    Args:
        between_seconds: mean time of training between two faults.
        overhead: largest share of the steps' time.
    """
    if step_seconds <= 0:
        return 1
    shortest = round(math.sqrt(2 * cost_seconds * max(0.0, between_seconds)) / step_seconds)
    return max(shortest, steps_within(overhead, cost_seconds, step_seconds))


def expired(
    parts: Iterable[Part],
    keep: int,
    writing: Version,
    versions: Iterable[Version] = (),
    damaged: Iterable[Version] = (),
) -> tuple[Version, ...]:
    """Return the versions to remove from storage: the newest `keep` complete ones stay.

    Of the incomplete ones before `writing` the newest stays too: some ranks may not have ended it.
    The others were given up, such as in a full storage. Damaged ones stay until there are `keep`
    complete ones after them. Without a complete version all stay. Those after `writing` stay and do
    not count: the ranks have passed over them as damaged.

    Args:
        writing: version that the ranks write now, or have written last.
        versions: all versions in storage, also those without a committed part.
        damaged: versions with a part that was committed and is damaged.
    """
    found = list(parts)
    complete = [version for version in complete_versions(found) if version <= writing]
    if not complete:
        return ()
    held = {part.version for part in found} | set(versions)
    old = {version for version in held if len(complete) >= keep and version < complete[-keep]}
    given_up = held - set(complete) - set(damaged)
    ended = sorted(version for version in given_up if version < writing)
    return tuple(sorted(old | set(ended[:-1])))


def complete_versions(parts: Iterable[Part]) -> list[Version]:
    """Return the versions of which all parts are there, in their order."""
    held: dict[Version, set[Part]] = {}
    for part in parts:
        held.setdefault(part.version, set()).add(part)
    return sorted(version for version, found in held.items() if _is_complete(found))


def _is_complete(parts: set[Part]) -> bool:
    shared = [part for part in parts if part.rank == SHARED]
    return any(
        all(part._replace(rank=rank) in parts for rank in range(part.ranks)) for part in shared
    )
