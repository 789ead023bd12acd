"""Rank assignment in a gang whose nodes have different roles and numbers of workers.

Each agent writes its role and size to the round's store; the agent of group rank 0 computes all
ranks and writes them back. Keys and values are torch's, so that agents of both kinds agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.core.roster import ranks


@dataclass(frozen=True, slots=True)
class RoleInstanceInfo:
    """Contribution of one agent: `local_world_size` workers of `role`, at group rank `rank`."""

    role: str
    rank: int
    local_world_size: int

    def serialize(self) -> bytes:
        fields = {
            "role": self.role,
            "rank": self.rank,
            "local_world_size": self.local_world_size,
        }
        return json.dumps(fields).encode()

    @staticmethod
    def deserialize(data: bytes) -> RoleInstanceInfo:
        fields = json.loads(data.decode())
        return RoleInstanceInfo(fields["role"], fields["rank"], fields["local_world_size"])

    @staticmethod
    def compare(obj1: RoleInstanceInfo, obj2: RoleInstanceInfo) -> int:
        """Compare by role, then by rank; return a negative number, 0 or a positive number."""
        if obj1.role == obj2.role:
            return obj1.rank - obj2.rank
        return 1 if obj1.role > obj2.role else -1

    @staticmethod
    def find_role_boundaries(roles_infos: Sequence[RoleInstanceInfo], role: str) -> tuple[int, int]:
        """Return the first and last index of a role; (-1, -1) if it is absent."""
        found = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (found[0], found[-1]) if found else (-1, -1)


@dataclass(frozen=True, slots=True)
class Assigned:
    """Ranks of one agent's first worker, and the numbers of workers in all and of its role."""

    base_rank: int
    world_size: int
    role_base_rank: int
    role_world_size: int


def assigned_alike(group_rank: int, group_world_size: int, slots: int) -> Assigned:
    """Compute the ranks if all agents have the same role and size, without the store."""
    base, size = group_rank * slots, group_world_size * slots
    return Assigned(base, size, base, size)


def assigned_in(store: Any, mine: RoleInstanceInfo, group_world_size: int) -> Assigned:
    """Agree on this agent's ranks through the store. Blocks until all agents have written."""
    store.set(_role_info(mine.rank), mine.serialize())
    if mine.rank == 0:
        keys = [_role_info(rank) for rank in range(group_world_size)]
        infos = [RoleInstanceInfo.deserialize(raw) for raw in store.multi_get(keys)]
        values = [json.dumps(row) for row in _rows(infos)]
        store.multi_set([_assigned_ranks(rank) for rank in range(group_world_size)], values)
    return Assigned(*json.loads(store.get(_assigned_ranks(mine.rank))))


def ranks_between(
    infos: Sequence[RoleInstanceInfo], index: int, start: int = 0, end: int = -1
) -> tuple[int, list[int]]:
    """Return the number of workers of the agents from `start` to `end` (exclusive), and the ranks
    of one agent's workers among them. `end` -1 includes all agents."""
    sizes = [info.local_world_size for info in infos]
    stop = len(sizes) if end == -1 else end
    base = sum(sizes[start : min(index, stop)])
    return sum(sizes[start:stop]), list(range(base, base + sizes[index]))


def _rows(infos: Sequence[RoleInstanceInfo]) -> list[tuple[int, int, int, int]]:
    world_size = sum(info.local_world_size for info in infos)
    placed = ranks((info.role, info.local_world_size) for info in infos)
    return [
        (place.base_rank, world_size, place.role_base_rank, place.role_world_size)
        for place in placed
    ]


def _role_info(group_rank: int) -> str:
    return f"torchelastic/role_info/{group_rank}"


def _assigned_ranks(group_rank: int) -> str:
    return f"torchelastic/assigned_ranks/{group_rank}"
