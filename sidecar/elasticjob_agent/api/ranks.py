"""Ranks of a node's workers in a round: agreed between roles, and converted between forms.

The three forms are a handler's answer, a roster, and a worker group. In a gang whose nodes have
different roles and numbers of workers, each agent writes its role and size to the round's
store; the agent of group rank 0 computes all ranks and writes them back. Keys and values are
torch's, so that agents of both kinds agree.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elasticjob_agent.api.spec import Worker, WorkerGroup, WorkerSpec, WorkerState
from elasticjob_agent.core.model import Event, RuntimeEvent, State, WorkersCounted
from elasticjob_agent.worker_runtime import Started
from elasticjob_rendezvous.api import RendezvousTimeoutError
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster, ranks


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


MASTER_SECONDS = 30.0
"""Maximum wait for rank 0 to write MASTER_ADDR and MASTER_PORT. It gets its rank when all do."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class HandlerAnswer:
    """Answer of a handler. `master` is None and `number` 0 if the handler does not set them."""

    store: Any
    group_rank: int
    group_world_size: int
    master: tuple[str, int] | None = None
    number: int = 0

    def at(self, address: str, port: int) -> HandlerAnswer:
        return replace(self, master=(address, port))


def join_through_handler(spec: WorkerSpec) -> HandlerAnswer:
    """Join the next round through the handler. Blocks.

    Supports handlers of ElasticJob and torch, also those of old versions, which return a tuple.
    """
    info = spec.rdzv_handler.next_rendezvous()
    if isinstance(info, tuple):
        store, group_rank, group_world_size = info
        return HandlerAnswer(store, group_rank, group_world_size)
    host = info.bootstrap_store_info
    master = None if host is None else (host.master_addr, int(host.master_port))
    # Some handlers number from 0, which means no round to an agent; all members must agree.
    number = getattr(info, "round", -1) + 1
    return HandlerAnswer(info.store, info.rank, info.world_size, master, number)


def await_master(store: Any) -> None:
    """Wait until rank 0 has written MASTER_ADDR and MASTER_PORT; some stores wait without limit.

    Raises:
        RendezvousTimeoutError: it did not within the smaller of the store's timeout and
            `MASTER_SECONDS`.
    """
    own = getattr(store, "timeout", None)
    seconds = min(MASTER_SECONDS, own.total_seconds()) if own is not None else MASTER_SECONDS
    deadline, keys = time.monotonic() + seconds, ["MASTER_ADDR", "MASTER_PORT"]
    check = getattr(store, "check", None)
    while store is None or (check is not None and not check(keys)):
        if store is None or time.monotonic() >= deadline:
            raise RendezvousTimeoutError(
                f"rank 0 wrote no MASTER_ADDR and MASTER_PORT to the round's store within "
                f"{seconds:g} s. If the handler returns bootstrap_store_info, use the address in "
                "it, or master_addr and master_port of the agent's worker group"
            )
        time.sleep(POLL_SECONDS)


def known_ranks(spec: WorkerSpec, group_rank: int) -> AssignedRanks | None:
    """Return this node's ranks if the handler knows the whole roster, as v3's does; else None.

    Raises:
        ValueError: the roster's number of workers for this node differs from the spec's.
    """
    roster = getattr(spec.rdzv_handler, "roster", None)
    if not isinstance(roster, Roster):
        return None
    assignment = roster.seats[group_rank]
    if assignment.slots != spec.local_world_size:
        raise ValueError(
            f"the rendezvous knows this node with {assignment.slots} workers, the spec has "
            f"{spec.local_world_size}: give the handler slots={spec.local_world_size}"
        )
    return AssignedRanks(
        assignment.base_rank,
        roster.world_size,
        assignment.role_base_rank,
        assignment.role_world_size,
    )


def roster_of(group: WorkerGroup, member: str, restarts: int, served: bool = False) -> Roster:
    """Return the roster as far as it is known: this node's ranks and the number of nodes."""
    first, nodes = group.workers[0], group.group_world_size
    assert nodes is not None, "there was no rendezvous"
    assert group.group_rank is not None
    assert group.master_addr is not None
    assert group.master_port is not None
    mine = RankAssignment(
        id=member,
        name=member,
        address="",
        slots=len(group.workers),
        role=group.spec.role,
        group_rank=group.group_rank,
        base_rank=first.global_rank,
        role_base_rank=first.role_rank,
        role_world_size=first.role_world_size,
    )
    seats = tuple(
        mine
        if rank == group.group_rank
        else RankAssignment("", f"node {rank}", "", 0, "", rank, 0, 0, 0)
        for rank in range(nodes)
    )
    return Roster(
        group.round,
        first.world_size,
        group.master_addr,
        group.master_port,
        seats,
        restarts,
        master_served=served,
    )


def update_group(group: WorkerGroup, state: State, event: Event) -> bool:
    """Update the group from the agent's state; return True if its workers have just started."""
    directive, node_group = state.directive, state.group
    if isinstance(event, WorkersCounted):
        group.spec.local_world_size = event.workers
        group.workers = [Worker(local_rank=index) for index in range(event.workers)]
    # The group may be ahead: `_rendezvous` updates it before the directive arrives.
    if isinstance(directive, Run) and directive.roster.number > group.round:
        _apply_roster(group, directive)
    group.state = _worker_state(state, group.state)
    started = event.event if isinstance(event, RuntimeEvent) else None
    if not isinstance(started, Started) or node_group is None or started.round != node_group.round:
        return False
    for worker in group.workers:
        worker.id = worker.id or started.pids.get(worker.local_rank)
    return True


def _apply_roster(group: WorkerGroup, run: Run) -> None:
    roster = run.roster
    assignment = roster.assignment(run.member)
    if assignment is None:
        return
    group.round = roster.number
    group.group_rank, group.group_world_size = assignment.group_rank, len(roster.seats)
    group.master_addr, group.master_port = roster.master_address, roster.master_port
    group.workers = [
        Worker(
            local_rank=local_rank,
            global_rank=assignment.base_rank + local_rank,
            role_rank=assignment.role_base_rank + local_rank,
            world_size=roster.world_size,
            role_world_size=assignment.role_world_size,
        )
        for local_rank in range(assignment.slots)
    ]


def _worker_state(state: State, former: WorkerState) -> WorkerState:
    node_group = state.group
    if node_group is None:
        return former
    if node_group.done:
        return WorkerState.SUCCEEDED
    if node_group.failure is not None:
        return WorkerState.FAILED if node_group.empty else WorkerState.UNHEALTHY
    if node_group.order is not None:
        return WorkerState.STOPPED
    return WorkerState.HEALTHY


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.bind(("", 0))
        return int(held.getsockname()[1])
