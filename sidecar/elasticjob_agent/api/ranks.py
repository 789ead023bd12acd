"""Worker group of an agent: ranks from a roster, state from the agent's state.

`RoleInstanceInfo` and `free_port` stand here under torch's names.
"""

from __future__ import annotations

import time
from typing import Any

from elasticjob_agent.api.spec import Worker, WorkerGroup, WorkerState
from elasticjob_agent.core.events import Event, RuntimeEvent
from elasticjob_agent.core.state import State
from elasticjob_agent.polling.agreement import AssignedRanks, RoleInstanceInfo
from elasticjob_agent.polling.join import HandlerAnswer, hosts_store, partial_roster
from elasticjob_agent.worker_runtime import Started
from elasticjob_rendezvous.api import RendezvousTimeoutError, reserved_port
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.records.roster import Roster

__all__ = [
    "RoleInstanceInfo",
    "await_master",
    "free_port",
    "ranked_workers",
    "roster_of",
    "update_group",
]

MASTER_SECONDS = 30.0
"""Maximum wait for rank 0 to write MASTER_ADDR and MASTER_PORT. It gets its rank when all do."""
POLL_SECONDS = 0.05


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


def ranked_workers(assigned: AssignedRanks, slots: int) -> list[Worker]:
    """Return the workers of an agent with these ranks."""
    return [
        Worker(
            local_rank=local_rank,
            global_rank=assigned.base_rank + local_rank,
            role_rank=assigned.role_base_rank + local_rank,
            world_size=assigned.world_size,
            role_world_size=assigned.role_world_size,
        )
        for local_rank in range(slots)
    ]


def roster_of(group: WorkerGroup, member: str, restarts: int) -> Roster:
    """Return the group's roster as far as it is known, see `polling.join.partial_roster`."""
    first, nodes = group.workers[0], group.group_world_size
    assert nodes is not None, "there was no rendezvous"
    assert group.group_rank is not None
    assert group.master_addr is not None
    assert group.master_port is not None
    spec, master = group.spec, (group.master_addr, group.master_port)
    answer = HandlerAnswer(group.store, group.group_rank, nodes, master, group.round)
    assigned = AssignedRanks(
        first.global_rank, first.world_size, first.role_rank, first.role_world_size
    )
    served = hosts_store(spec.rdzv_handler)
    return partial_roster(answer, member, spec.role, len(group.workers), assigned, restarts, served)


def update_group(group: WorkerGroup, state: State, event: Event) -> bool:
    """Update the group from the agent's state; return True if its workers have just started."""
    directive, node_group = state.directive, state.group
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
    assigned = AssignedRanks(
        assignment.base_rank,
        roster.world_size,
        assignment.role_base_rank,
        assignment.role_world_size,
    )
    group.workers = ranked_workers(assigned, assignment.slots)


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
    with reserved_port() as held:
        return int(held.getsockname()[1])
