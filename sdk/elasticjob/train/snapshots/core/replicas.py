"""Decisions about replicas: copies of the ranks' own parts in the memory of other nodes. No I/O.

The ranks copy one version at a time, a generation. Each rank sends its part to ranks on other
nodes. All ranks exchange the states of their copies before each snapshot: a generation of which all
copies are complete is confirmed, and only then may the confirmed one before it be overwritten.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from elasticjob.train.snapshots.core.agreement import SHARED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elasticjob.train.snapshots.core.agreement import Offer, Part, Plan, Version


class Member(NamedTuple):
    """Rank of the gang.

    Args:
        node: name of the memory that the ranks of one node share.
        domain: name of the machine; nodes of one domain are lost together.
    """

    rank: int
    node: str
    domain: str


class State(enum.IntEnum):
    """State of one rank's copies of the current generation."""

    IDLE = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3


def holders(members: Sequence[Member], replicas: int) -> dict[str, tuple[str, ...]]:
    """Return the nodes that hold the copies of each node's parts.

    The nodes form a ring. Each node sends its copies to the nodes at fixed distances after it, so
    that each node also receives `replicas` copies. Nodes of one domain are adjacent in the ring;
    the distances are those that reach the most other domains.
    """
    ring = _ring(members)
    domains = [domain for _, domain in ring]
    seen = [{domain} for domain in domains]
    chosen: list[int] = []
    size = len(ring)
    # Of equal distances the first wins. Multiples of the largest domain leave further domains for
    # the next copies; those near half of the circle lead out of their own domain.
    largest = max((domains.count(domain) for domain in set(domains)), default=1)
    left = sorted(range(1, size), key=lambda each: (each % largest != 0, abs(2 * each - size)))
    while left and len(chosen) < replicas:
        best, most = left[0], -1
        for distance in left:
            score = sum(domains[(i + distance) % size] not in seen[i] for i in range(size))
            if score > most:
                best, most = distance, score
            if most == size:
                break
        left.remove(best)
        chosen.append(best)
        for i in range(size):
            seen[i].add(domains[(i + best) % size])
    return {
        node: tuple(ring[(i + distance) % size][0] for distance in chosen)
        for i, (node, _) in enumerate(ring)
    }


def _ring(members: Sequence[Member]) -> list[tuple[str, str]]:
    """Return the nodes with their domains, those of a domain together, large domains first."""
    found: dict[str, dict[str, None]] = {}
    for member in sorted(members):
        found.setdefault(member.domain, {}).setdefault(member.node)
    groups = sorted(found.items(), key=lambda item: -len(item[1]))
    return [(node, domain) for domain, nodes in groups for node in nodes]


def receivers(members: Sequence[Member], replicas: int) -> dict[int, tuple[int, ...]]:
    """Return, by rank, the ranks that receive a copy of its part: one on each holding node."""
    ranks = _ranks(members)
    nodes = holders(members, replicas)
    return {
        rank: tuple(ranks[node][index % len(ranks[node])] for node in nodes[home])
        for home, own in ranks.items()
        for index, rank in enumerate(own)
    }


def copies_at(
    members: Sequence[Member], replicas: int, node: str, is_sharded: bool
) -> frozenset[int]:
    """Return the ranks whose parts a node has copies of; `SHARED` stands for the shared part.

    With sharded state a node also holds copies of its own parts: its buffers for snapshots are
    overwritten before a generation is confirmed.
    """
    ranks, nodes = _ranks(members), holders(members, replicas)
    held = {rank for home, to in nodes.items() if node in to for rank in ranks[home]}
    return frozenset(held | {SHARED, *ranks[node]} if is_sharded else held)


def _ranks(members: Sequence[Member]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for member in sorted(members):
        found.setdefault(member.node, []).append(member.rank)
    return found


class Generations:
    """Progress of the replication; the same on all ranks, which pass the same states.

    Args:
        confirmed: result of `kept`.
    """

    def __init__(self, confirmed: Version | None = None) -> None:
        self.confirmed = confirmed
        self.running: Version | None = None
        self.has_confirmed = False  # with the receivers of this round
        self.is_complete = False
        """True if the copies of the last generation of this round are complete on all nodes."""

    def exchanged(self, states: Iterable[State]) -> bool:
        """Evaluate the states of all ranks; return True if the next generation may begin.

        A generation is confirmed once the copies of all ranks are complete. If a rank failed, the
        next generation overwrites it.
        """
        found = set(states)
        if State.RUNNING in found:
            return False
        if self.running is not None:
            self.is_complete = found == {State.DONE}
            if self.is_complete:
                self.confirmed, self.has_confirmed = self.running, True
        self.running = None
        return True

    def begin(self, version: Version) -> None:
        self.running = version


def kept(
    offers: Sequence[Offer], members: Sequence[Member], plan: Plan | None, is_sharded: bool
) -> Version | None:
    """Return the version whose copies are kept until a generation of the new gang is confirmed.

    It is the newest version with copies of all ranks' own parts. The restored version may have
    none yet, for example after a stop copy; if a node is lost now, the version before is restored.

    With sharded state the buffers for snapshots are overwritten earlier, so only copies count. Of
    the versions that are complete in copies, the one that survives the most losses is kept, since a
    newer one may have been copied in part.
    """
    if not is_sharded:
        return None if plan is None or not plan.own else _newest_copied(offers, plan.version)
    at: dict[Part, set[Member]] = {}
    for member, offer in zip(sorted(members), offers):
        for part in offer.replicas:
            at.setdefault(part, set()).add(member)
    found = []
    for shared in at:
        if shared.rank == SHARED and (shared.ranks == len(offers) or shared.reshards):
            parts = [shared, *(shared._replace(rank=rank) for rank in range(shared.ranks))]
            places = [at.get(part, set()) for part in parts]
            nodes = min(len({member.node for member in each}) for each in places)
            domains = min(len({member.domain for member in each}) for each in places)
            found.append((nodes, domains, shared.version))
    best = max(found, default=None)
    return best[2] if best is not None and best[0] else None


def _newest_copied(offers: Sequence[Offer], restored: Version) -> Version:
    """Return the newest version that has all copies, up to the restored one; else that one."""
    copies = {part for offer in offers for part in offer.replicas}
    there = {part for offer in offers for part in (*offer.memory, *offer.storage)}
    found = [
        part.version
        for part in there
        if part.rank == SHARED
        and part.version <= restored
        and part.ranks == len(offers)
        and all(part._replace(rank=rank) in copies for rank in range(part.ranks))
    ]
    return max(found, default=restored)


def replica_to_overwrite(held: Sequence[Part | None], keep: Version | None) -> int:
    """Return the index of the buffer for the next copy: an empty one, else one without `keep`."""
    for index, part in enumerate(held):
        if part is None:
            return index
    for index, part in enumerate(held):
        if part is not None and part.version != keep:
            return index
    return 0  # all buffers hold `keep`


def step_to_overwrite(held: Sequence[Part | None], part: Part) -> int | None:
    """Return the index of the buffer for a rank's own part of a step; None for a delayed one.

    The order is: the buffer of the same part, an empty one, the one with the older part. Parts of
    an earlier gang are older even at a higher step, since the ranks have gone back to an older one.
    """
    if part in held:
        return held.index(part)
    for index, each in enumerate(held):
        if each is None:
            return index
    # Of one step the part that the ranks have renamed, after an older snapshot, is the newer one.
    order = [_age(each) for each in held if each is not None]
    if max(order) > _age(part):
        return None
    return order.index(min(order))


def _age(part: Part) -> tuple[int, int, int]:
    return part.version.gang, part.version.step, -part.before


class Accepted:
    """Newest copy that a rank has accepted of each sender."""

    def __init__(self) -> None:
        self._newest: dict[int, Version] = {}

    def accepts(self, part: Part) -> bool:
        """Return True unless the copy is older than an accepted one: it was delayed, and would
        overwrite the confirmed one."""
        if part.version < self._newest.get(part.rank, part.version):
            return False
        self._newest[part.rank] = part.version
        return True


def is_stale(part: Part, needed: Iterable[Version | None], ranks: int, is_sharded: bool) -> bool:
    """Return True if the gang can restore no snapshot with this copy: a node may remove it at once.

    A copy of another number of ranks is useless; one of sharded state, if it is of another version.

    Args:
        needed: version that the gang has restored, and the result of `kept`.
        ranks: number of ranks of the gang.
    """
    return part.version not in needed and (is_sharded or part.ranks != ranks)


def may_drop(part: Part, ranks: frozenset[int], generations: Generations) -> bool:
    """Return True if a node may remove a copy: this round has others, on the nodes that it chose.

    Args:
        ranks: result of `copies_at` for the node.
    """
    return generations.has_confirmed and part.rank not in ranks
