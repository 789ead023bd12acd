"""How an agent gets its place in a round, and ranks for its workers, from any handler."""

from __future__ import annotations

import logging
import socket
from typing import Any

from elasticjob_agent.api import meeting, places
from elasticjob_agent.api.budget import Budget
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.roles import (
    Assigned,
    RoleInstanceInfo,
    assigned_alike,
    assigned_in,
    ranks_between,
)
from elasticjob_agent.api.spec import Worker, WorkerGroup, WorkerSpec
from elasticjob_agent.api.stores import synchronize
from elasticjob_agent.api.telling import Telling
from elasticjob_agent.settings import workers_are_identical

log = logging.getLogger("elasticjob.agent")

AGENT = "SimpleElasticAgent"
"""The class that this is a part of, and whose name the metrics of its steps have."""


class Placing(Telling):
    """The part of an agent that asks its handler."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        super().__init__(worker_group)
        self._store: Any = None
        self._budget = Budget()
        self._master_served = False
        self._offered = 0

    @prof(name=f"{AGENT}._rendezvous")
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Get a place in the next round, and ranks for our workers. Blocks."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            place = places.next_place(spec)
        if place.master is None:  # a handler of old: rank 0 says where
            if place.group_rank == 0:
                self._set_master_addr_port(
                    place.store, spec.master_addr, spec.master_port, spec.local_addr
                )
            place = place.at(*self._get_master_addr_port(place.store))
        assert place.master is not None
        self._store = worker_group.store = place.store
        shared = place.store is not None and not workers_are_identical()
        if shared:
            self._budget.announce(place.store)
        meets = shared and self._meets(spec, place)
        if meets:
            self._offered = place.number
            meeting.offer(place.store, place.group_rank, self._served_port() or 0)
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(
                place.store, place.group_rank, place.group_world_size, spec
            )
        if shared:
            self._budget.agree(place.store)
        else:
            self._budget.alone()
        served = meeting.agreed(place.store, place.group_world_size) if meets else 0
        self._master_served = served > 0
        worker_group.group_rank = place.group_rank
        worker_group.group_world_size = place.group_world_size
        worker_group.round = max(place.number, worker_group.round + 1)
        worker_group.master_addr = spec.master_addr or place.master[0]
        worker_group.master_port = spec.master_port or served or place.master[1]
        self._remaining_restarts = min(
            self._remaining_restarts, spec.max_restarts - self._budget.total
        )
        log.info(
            "[%s] rendezvous %d: group rank %d of %d, workers %s, master %s:%d",
            spec.role, worker_group.round, place.group_rank, place.group_world_size,
            worker_group.workers, worker_group.master_addr, worker_group.master_port,
        )  # fmt: skip

    def _meets(self, spec: WorkerSpec, place: places.NextPlace) -> bool:
        """Whether our workers may meet at another store than the one that the handler names.

        Nobody has his ranks before all have spoken, if they are assigned through the store. In
        a round that gave us a place before we have spoken already.
        """
        if spec.master_addr or spec.master_port or place.number == self._offered:
            return False
        given = places.known_ranks(spec, place.group_rank)
        return self._served_port() is not None and given is None

    def _served_port(self) -> int | None:
        """Where this node serves a store for workers at this moment; 0 for nowhere.

        None where workers would not know that rank 0 is not to serve it.
        """
        return None

    @prof(name=f"{AGENT}._assign_worker_ranks")
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Our workers with their ranks, as all agents agree on them through the store.

        Where every node brings the same (TORCH_ELASTIC_WORKER_IDENTICAL=1) nobody is asked.
        """
        slots = spec.local_world_size
        known = places.known_ranks(spec, group_rank)
        if known is not None:
            assigned = known
        elif store is None or workers_are_identical():
            assigned = assigned_alike(group_rank, group_world_size, slots)
        else:
            mine = RoleInstanceInfo(spec.role, group_rank, slots)
            assigned = assigned_in(store, mine, group_world_size)
        return _workers(assigned, slots)

    def _share_and_gather(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[RoleInstanceInfo]:
        """Every agent's role and size, in group rank order."""
        mine = RoleInstanceInfo(spec.role, group_rank, spec.local_world_size)
        found = synchronize(
            store, mine.serialize(), group_rank, group_world_size, "torchelastic/role_info"
        )
        return [RoleInstanceInfo.deserialize(raw) for raw in found]

    def _get_ranks(
        self,
        role_infos: list[RoleInstanceInfo],
        role_idx: int,
        start_idx: int = 0,
        end_idx: int = -1,
    ) -> tuple[int, list[int]]:
        """How many workers there are between two indices, and the ranks of one agent's."""
        return ranks_between(role_infos, role_idx, start_idx, end_idx)

    @staticmethod
    def _set_master_addr_port(
        store: Any, master_addr: str | None, master_port: int | None, local_addr: str | None
    ) -> None:
        """Say where rank 0 hosts torch's store: as told, else here at a free port."""
        address = master_addr or local_addr or socket.getfqdn(socket.gethostname())
        store.set("MASTER_ADDR", address.encode())
        store.set("MASTER_PORT", str(master_port or places.free_port()).encode())

    @staticmethod
    def _get_master_addr_port(store: Any) -> tuple[str, int]:
        """Return the address and port that rank 0 wrote with `_set_master_addr_port`.

        Raises:
            RendezvousTimeoutError: nobody wrote it in time, as where the handler returns
                bootstrap information instead.
        """
        places.await_master(store)
        return store.get("MASTER_ADDR").decode(), int(store.get("MASTER_PORT"))


def _workers(assigned: Assigned, slots: int) -> list[Worker]:
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
