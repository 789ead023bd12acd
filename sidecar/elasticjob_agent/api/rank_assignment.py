"""Rank assignment: join a round through any handler, and assign ranks to the workers.

The agents of a round agree through its store on two more values. Both are complete once ranks
are assigned, and torch's agents take part in neither.

The restart budget: before it publishes its role, an agent that took part in an earlier round
writes its count of charged failures, and an agent whose worker failed increments a counter.
Without rank assignment through the store each agent counts alone.

The bootstrap store: a handler names an address and a port where rank 0's worker is to serve
it. There a worker that connects too early has to wait, and the store ends with rank 0 if rank
0 finishes first. The agents agree to use the store that the launcher of rank 0's node already
serves instead; with one of torch's agents in the round the handler's address is used.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from elasticjob_agent.api import ranks
from elasticjob_agent.api.event_emitter import EventEmitter
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.ranks import (
    AssignedRanks,
    RoleInstanceInfo,
    assign_identical,
    assign_through_store,
    ranks_between,
)
from elasticjob_agent.api.spec import Worker, WorkerGroup, WorkerSpec
from elasticjob_agent.polling.round_store import synchronize
from elasticjob_agent.settings import workers_are_identical

RESTARTS_KEY = "elasticjob/restarts"
CHARGED_KEY = "elasticjob/charged"


class RestartBudget:
    """Restart budget: `total` failures charged so far, one more pending if `charge` is set."""

    def __init__(self, total: int = 0, charge: bool = False) -> None:
        self.total = total
        self._charge = charge

    def announce(self, store: Any) -> None:
        """Write this agent's count to the store; call before ranks are assigned."""
        if self.total:
            store.set(RESTARTS_KEY, str(self.total).encode())
        if self._charge:
            store.add(CHARGED_KEY, 1)

    def agree(self, store: Any) -> None:
        """Read the total, equal on all agents; call after ranks are assigned."""
        if store.check([RESTARTS_KEY]):
            self.total = max(self.total, int(store.get(RESTARTS_KEY)))
        if store.check([CHARGED_KEY]):
            self.total += 1
        self._charge = False

    def alone(self) -> None:
        """Count without the other agents."""
        self.total += self._charge
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


log = logging.getLogger("elasticjob.agent")

METRIC_PREFIX = "SimpleElasticAgent"
"""Class name in the metrics of these steps, as in torch."""


class RankAssigner(EventEmitter):
    """Part of an agent that joins rounds through its handler."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        super().__init__(worker_group)
        self._store: Any = None
        self._budget = RestartBudget()
        self._master_served = False
        self._offered = 0

    @prof(name=f"{METRIC_PREFIX}._rendezvous")
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round and assign ranks to this node's workers. Blocks."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            place = ranks.join_through_handler(spec)
        if place.master is None:  # an old handler: rank 0 writes the address
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
            offer_store(place.store, place.group_rank, self._served_port() or 0)
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(
                place.store, place.group_rank, place.group_world_size, spec
            )
        if shared:
            self._budget.agree(place.store)
        else:
            self._budget.alone()
        served = agreed_store_port(place.store, place.group_world_size) if meets else 0
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

    def _meets(self, spec: WorkerSpec, place: ranks.HandlerAnswer) -> bool:
        """Return True if the workers may use another bootstrap store than the handler names.

        That requires rank assignment through the store, which completes only after all agents have
        made their offers. An agent that joins the same round again has already made its offer.
        """
        if spec.master_addr or spec.master_port or place.number == self._offered:
            return False
        given = ranks.known_ranks(spec, place.group_rank)
        return self._served_port() is not None and given is None

    def _served_port(self) -> int | None:
        """Return the port of a store that this node serves for workers; 0 for none.

        None if this agent cannot make rank 0's worker use a served store.
        """
        return None

    @prof(name=f"{METRIC_PREFIX}._assign_worker_ranks")
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this node's workers with ranks that all agents agree on through the store.

        If all nodes are identical (TORCH_ELASTIC_WORKER_IDENTICAL=1), the ranks are computed
        without the store.
        """
        slots = spec.local_world_size
        known = ranks.known_ranks(spec, group_rank)
        if known is not None:
            assigned = known
        elif store is None or workers_are_identical():
            assigned = assign_identical(group_rank, group_world_size, slots)
        else:
            mine = RoleInstanceInfo(spec.role, group_rank, slots)
            assigned = assign_through_store(store, mine, group_world_size)
        return _ranked_workers(assigned, slots)

    def _share_and_gather(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[RoleInstanceInfo]:
        """Exchange roles and sizes; return those of all agents in group rank order."""
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
        """Return the number of workers between two indices, and the ranks of one agent's."""
        return ranks_between(role_infos, role_idx, start_idx, end_idx)

    @staticmethod
    def _set_master_addr_port(
        store: Any, master_addr: str | None, master_port: int | None, local_addr: str | None
    ) -> None:
        """Write the address of rank 0's store: as given, else this host and a free port."""
        address = master_addr or local_addr or socket.getfqdn(socket.gethostname())
        store.set("MASTER_ADDR", address.encode())
        store.set("MASTER_PORT", str(master_port or ranks.free_port()).encode())

    @staticmethod
    def _get_master_addr_port(store: Any) -> tuple[str, int]:
        """Return the address and port that rank 0 wrote with `_set_master_addr_port`.

        Raises:
            RendezvousTimeoutError: rank 0 did not write it in time, for example because the
                handler returns bootstrap information instead.
        """
        ranks.await_master(store)
        return store.get("MASTER_ADDR").decode(), int(store.get("MASTER_PORT"))


def _ranked_workers(assigned: AssignedRanks, slots: int) -> list[Worker]:
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
