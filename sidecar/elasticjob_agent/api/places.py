"""Place in a round in its three forms: a handler's answer, a roster, and a worker group."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from elasticjob_agent.api.roles import Assigned
from elasticjob_agent.api.spec import Worker, WorkerGroup, WorkerSpec, WorkerState
from elasticjob_agent.core.model import Event, FromHands, State
from elasticjob_agent.hands import Started
from elasticjob_rendezvous.api import RendezvousTimeoutError
from elasticjob_rendezvous.core.directives import Run
from elasticjob_rendezvous.core.roster import Roster, Seat

MASTER_SECONDS = 30.0
"""Maximum wait for rank 0 to write MASTER_ADDR and MASTER_PORT. It gets its rank when all do."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class NextPlace:
    """Answer of a handler. `master` is None and `number` 0 if the handler does not set them."""

    store: Any
    group_rank: int
    group_world_size: int
    master: tuple[str, int] | None = None
    number: int = 0

    def at(self, address: str, port: int) -> NextPlace:
        return replace(self, master=(address, port))


def next_place(spec: WorkerSpec) -> NextPlace:
    """Join the next round through the handler. Blocks.

    Supports handlers of ElasticJob and torch, also those of old versions, which return a tuple.
    """
    info = spec.rdzv_handler.next_rendezvous()
    if isinstance(info, tuple):
        store, group_rank, group_world_size = info
        return NextPlace(store, group_rank, group_world_size)
    host = info.bootstrap_store_info
    master = None if host is None else (host.master_addr, int(host.master_port))
    # Some handlers number from 0, which means no round to an agent; all members must agree.
    number = getattr(info, "round", -1) + 1
    return NextPlace(info.store, info.rank, info.world_size, master, number)


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


def known_ranks(spec: WorkerSpec, group_rank: int) -> Assigned | None:
    """Return this node's ranks if the handler knows the whole roster, as v3's does; else None.

    Raises:
        ValueError: the roster's number of workers for this node differs from the spec's.
    """
    roster = getattr(spec.rdzv_handler, "roster", None)
    if not isinstance(roster, Roster):
        return None
    seat = roster.seats[group_rank]
    if seat.slots != spec.local_world_size:
        raise ValueError(
            f"the rendezvous knows this node with {seat.slots} workers, the spec has "
            f"{spec.local_world_size}: give the handler slots={spec.local_world_size}"
        )
    return Assigned(seat.base_rank, roster.world_size, seat.role_base_rank, seat.role_world_size)


def roster_of(group: WorkerGroup, member: str, restarts: int, served: bool = False) -> Roster:
    """Return the roster as far as it is known: this node's ranks and the number of nodes."""
    first, nodes = group.workers[0], group.group_world_size
    assert nodes is not None, "there was no rendezvous"
    assert group.group_rank is not None
    assert group.master_addr is not None
    assert group.master_port is not None
    mine = Seat(
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
        mine if rank == group.group_rank else Seat("", f"node {rank}", "", 0, "", rank, 0, 0, 0)
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


def observe(group: WorkerGroup, state: State, event: Event) -> bool:
    """Update the group from the agent's state; return True if its workers have just started."""
    directive, crew = state.directive, state.crew
    # The group may be ahead: `_rendezvous` updates it before the directive arrives.
    if isinstance(directive, Run) and directive.roster.number > group.round:
        _seat(group, directive)
    group.state = _state(state, group.state)
    started = event.event if isinstance(event, FromHands) else None
    if not isinstance(started, Started) or crew is None or started.round != crew.round:
        return False
    for worker in group.workers:
        worker.id = worker.id or started.pids.get(worker.local_rank)
    return True


def _seat(group: WorkerGroup, run: Run) -> None:
    roster = run.roster
    seat = roster.seat(run.member)
    if seat is None:
        return
    group.round = roster.number
    group.group_rank, group.group_world_size = seat.group_rank, len(roster.seats)
    group.master_addr, group.master_port = roster.master_address, roster.master_port
    group.workers = [
        Worker(
            local_rank=local_rank,
            global_rank=seat.base_rank + local_rank,
            role_rank=seat.role_base_rank + local_rank,
            world_size=roster.world_size,
            role_world_size=seat.role_world_size,
        )
        for local_rank in range(seat.slots)
    ]


def _state(state: State, former: WorkerState) -> WorkerState:
    crew = state.crew
    if crew is None:
        return former
    if crew.done:
        return WorkerState.SUCCEEDED
    if crew.failure is not None:
        return WorkerState.FAILED if crew.empty else WorkerState.UNHEALTHY
    if crew.order is not None:
        return WorkerState.STOPPED
    return WorkerState.HEALTHY


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.bind(("", 0))
        return int(held.getsockname()[1])
