"""Values that the nodes of a round agree on through its store: ranks, restart budget, store.

Each value is complete once ranks are assigned.

Ranks: in a gang whose nodes have different roles and numbers of workers, each agent writes its
role and size to the round's store; the agent of group rank 0 computes all ranks and writes them
back. Keys and values are torch's, so that agents of both kinds agree.

The restart budget: before it publishes its role, an agent that took part in an earlier round
writes its count of charged failures, and an agent whose worker failed increments a counter.
Without rank assignment through the store each agent counts alone. torch's agents take no part.

The bootstrap store: a handler names an address and a port where rank 0's worker is to serve
it. There a worker that connects too early has to wait, and the store ends with rank 0 if rank
0 finishes first. The agents agree to use the store that the launcher of rank 0's node already
serves instead; with one of torch's agents in the round the handler's address is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_agent.settings import workers_are_identical
from elasticjob_rendezvous.protocol.records.roster import Roster, ranks


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
class AssignedRanks:
    """Ranks of one agent's first worker, and the numbers of workers in all and of its role."""

    base_rank: int
    world_size: int
    role_base_rank: int
    role_world_size: int


def assign_identical(group_rank: int, group_world_size: int, slots: int) -> AssignedRanks:
    """Compute the ranks if all agents have the same role and size, without the store."""
    base, size = group_rank * slots, group_world_size * slots
    return AssignedRanks(base, size, base, size)


def assign_through_store(
    store: Any, mine: RoleInstanceInfo, group_world_size: int
) -> AssignedRanks:
    """Agree on this agent's ranks through the store. Blocks until all agents have written."""
    store.set(_role_info(mine.rank), mine.serialize())
    if mine.rank == 0:
        keys = [_role_info(rank) for rank in range(group_world_size)]
        infos = [RoleInstanceInfo.deserialize(raw) for raw in store.multi_get(keys)]
        values = [json.dumps(row) for row in _rows(infos)]
        store.multi_set([_assigned_ranks(rank) for rank in range(group_world_size)], values)
    return AssignedRanks(*json.loads(store.get(_assigned_ranks(mine.rank))))


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


def known_ranks(handler: Any, group_rank: int, slots: int) -> AssignedRanks | None:
    """Return this node's ranks if the handler knows the whole roster, as v3's does; else None.

    Raises:
        ValueError: the roster's number of workers for this node is not `slots`.
    """
    roster = getattr(handler, "roster", None)
    if not isinstance(roster, Roster):
        return None
    assignment = roster.seats[group_rank]
    if assignment.slots != slots:
        raise ValueError(
            f"the rendezvous knows this node with {assignment.slots} workers, the spec has "
            f"{slots}: give the handler slots={slots}"
        )
    return AssignedRanks(
        assignment.base_rank,
        roster.world_size,
        assignment.role_base_rank,
        assignment.role_world_size,
    )


def agreement_store(store: Any) -> Any:
    """Return the store of a round; None if its nodes exchange no values through it.

    They do not if there is no store, or if all nodes are identical
    (TORCH_ELASTIC_WORKER_IDENTICAL=1).
    """
    return None if workers_are_identical() else store


def assign_ranks(
    store: Any, mine: RoleInstanceInfo, group_world_size: int, known: AssignedRanks | None
) -> AssignedRanks:
    """Return this agent's ranks: the known ones, else those agreed on through the store.

    Without an exchange through the store all agents count as identical.
    """
    if known is not None:
        return known
    shared = agreement_store(store)
    if shared is None:
        return assign_identical(mine.rank, group_world_size, mine.local_world_size)
    return assign_through_store(shared, mine, group_world_size)


RESTARTS_KEY = "elasticjob/restarts"
CHARGED_KEY = "elasticjob/charged"


class RestartBudget:
    """Restart budget: `total` failures charged so far, one more pending if `charge` is set."""

    def __init__(self, total: int = 0, charge: bool = False) -> None:
        self.total = total
        self._charge = charge

    def announce(self, store: Any) -> None:
        """Write this agent's count to the store, if any; call before ranks are assigned."""
        if store is None:
            return
        if self.total:
            store.set(RESTARTS_KEY, str(self.total).encode())
        if self._charge:
            store.add(CHARGED_KEY, 1)

    def agree(self, store: Any) -> None:
        """Read the total, equal on all agents; call after ranks are assigned.

        Without a store this agent counts alone.
        """
        if store is None:
            self.total += self._charge
        else:
            if store.check([RESTARTS_KEY]):
                self.total = max(self.total, int(store.get(RESTARTS_KEY)))
            if store.check([CHARGED_KEY]):
                self.total += 1
        self._charge = False


SERVED_KEY = "elasticjob/served"
TAKING_PART_KEY = "elasticjob/ours"


def offer_store(store: Any, group_rank: int, port: int) -> None:
    """Publish this node's store; call before ranks are assigned. `port` is 0 without a store."""
    if group_rank == 0 and port:
        store.set(SERVED_KEY, str(port).encode())
    store.add(TAKING_PART_KEY, 1)


def agreed_store_port(store: Any, nodes: int) -> int:
    """Return the store's port on rank 0's node, equal on all agents; 0 if they did not agree.

    Call after ranks are assigned.
    """
    if not store.check([SERVED_KEY]) or int(store.get(TAKING_PART_KEY)) < nodes:
        return 0
    return int(store.get(SERVED_KEY))
