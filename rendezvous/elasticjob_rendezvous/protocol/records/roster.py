"""Record of a round's members: rank assignment and legal sizes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from elasticjob_rendezvous.protocol.records.codec import prepare
from elasticjob_rendezvous.protocol.records.keys import MOST_DIGITS
from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

_DIGITS = re.compile(r"(\d+)")


class RankAssignment(NamedTuple):
    """Rank assignment of one member. Ranks count workers; `group_rank` counts members.

    `session` and the ports are of the moment when the round was sealed: a later coordinator can
    probe a member that is gone from etcd.

    A tuple, because every member reads the rank assignments of all in every round.
    """

    id: str
    name: str
    address: str
    slots: int
    role: str
    group_rank: int
    base_rank: int
    role_base_rank: int
    role_world_size: int
    node: str = ""
    session: str = ""
    agent_port: int = 0
    launcher_port: int = 0


@dataclass(frozen=True, slots=True)
class Roster:
    """Sealed membership of one final round, in rank order."""

    number: int
    world_size: int
    master_address: str
    master_port: int
    seats: tuple[RankAssignment, ...]
    restarts: int = 0
    master_served: bool = False
    """Set when a store for the workers listens at the master's port already; else rank 0 serves
    it."""
    max_world_size: int = 0
    """Number of workers of the job at its full size, where that is known."""

    def assignment(self, member: str) -> RankAssignment | None:
        return next((assignment for assignment in self.seats if assignment.id == member), None)


def legal_size(bounds: RendezvousParams, available: int) -> int:
    """Return the largest legal size that `available` members can fill, or 0.

    Legal sizes are min_nodes + k * increment, up to max_nodes.
    """
    top = min(available, bounds.max_nodes)
    if top < bounds.min_nodes:
        return 0
    return top - (top - bounds.min_nodes) % bounds.increment


@lru_cache(maxsize=4096)
def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in which `pod-2` comes before `pod-10`."""
    return tuple(
        (0, int(part), part) if part.isdecimal() and len(part) <= MOST_DIGITS else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
    )


def by_name(members: Iterable[Member]) -> list[Member]:
    """Return the members in rank order: natural order of names, ids breaking ties."""
    return sorted(members, key=lambda member: (natural_order(member.name), member.id))


class Ranks(NamedTuple):
    """Position of one member's workers among all workers, and among those of their role."""

    base_rank: int
    role_base_rank: int
    role_world_size: int


def ranks(sizes: Iterable[tuple[str, int]]) -> list[Ranks]:
    """Return the ranks of members with these roles and slots, in rank order.

    They are a bijection onto 0 … world size - 1; role ranks count within a role.
    """
    sizes = list(sizes)
    role_sizes: Counter[str] = Counter()
    for role, slots in sizes:
        role_sizes[role] += slots
    found = []
    base_rank = 0
    role_bases: Counter[str] = Counter()
    for role, slots in sizes:
        found.append(Ranks(base_rank, role_bases[role], role_sizes[role]))
        base_rank += slots
        role_bases[role] += slots
    return found


def seal(number: int, members: Iterable[Member], restarts: int, ceiling_nodes: int = 0) -> Roster:
    """Return the roster of a round: ranks are a bijection onto 0 … world size - 1.

    Members may have different numbers of slots, and roles: role ranks count within a role, in the
    same order.
    """
    ordered = by_name(members)
    placed = ranks((member.role, member.slots) for member in ordered)
    seats = tuple(
        RankAssignment(
            id=member.id,
            name=member.name,
            address=member.address,
            slots=member.slots,
            role=member.role,
            group_rank=group_rank,
            base_rank=place.base_rank,
            role_base_rank=place.role_base_rank,
            role_world_size=place.role_world_size,
            node=member.node,
            session=member.session,
            agent_port=member.agent_port,
            launcher_port=member.launcher_port,
        )
        for group_rank, (member, place) in enumerate(zip(ordered, placed, strict=True))
    )
    world_size = sum(member.slots for member in ordered)
    most = ceiling_nodes * max(member.slots for member in ordered)
    master = ordered[0]
    # An agent that does not know the field would give its workers another value than the others.
    # A single worker gains nothing, and processes that it starts may meet at another address.
    served = world_size > 1 and all(member.master_served for member in ordered)
    return Roster(
        number,
        world_size,
        master.address,
        master.master_port,
        seats,
        restarts,
        served,
        max(most, world_size) if ceiling_nodes else 0,
    )


prepare(Roster)
