"""torch's elastic agent classes: `ElasticAgent`, and the base class `SimpleElasticAgent`.

`run` runs the agent of ElasticJob's pods (`elasticjob_agent.agent.Agent` around `core.step`). The
methods named as in torch are its steps: `run` calls those that do a single thing (`_rendezvous`,
`_assign_worker_ranks`, `_start_workers`, `_stop_workers`, `_monitor_workers`); a custom run loop
may call all of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from elasticjob_agent.agent import Agent
from elasticjob_agent.api import ranks
from elasticjob_agent.api.event_emitter import EventEmitter
from elasticjob_agent.api.events import EventSource
from elasticjob_agent.api.method_runtime import MethodRuntime
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.native_handler import DirectedHandler
from elasticjob_agent.api.run_loop import PeriodicRecorder, call_shutdown, run_result, run_to_end
from elasticjob_agent.api.spec import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_agent.core.events import Event
from elasticjob_agent.core.poll_step import JoinTrouble, PollingTerms
from elasticjob_agent.core.state import Ending, State
from elasticjob_agent.polling.agreement import (
    RestartBudget,
    RoleInstanceInfo,
    agreement_store,
    assign_ranks,
    known_ranks,
    ranks_between,
)
from elasticjob_agent.polling.handler_rendezvous import HandlerRendezvous
from elasticjob_agent.polling.join import Place, join_through_handler
from elasticjob_agent.polling.poll import trouble_of
from elasticjob_agent.polling.round_store import TERMINAL_STATE_SYNC_ID, barrier, synchronize
from elasticjob_agent.ports import AgentHooks, NodeSettings, Rendezvous, StateReader
from elasticjob_agent.settings import LogSettings, WarmStart
from elasticjob_agent.worker_runtime import StartWorkers, WorkerRuntime
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler
from elasticjob_rendezvous.protocol.directives import Run

log = logging.getLogger("elasticjob.agent")

SHUTDOWN_SECONDS = 30
NO_LOGS = LogSettings()
EXIT_BARRIER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Implementation of `ports.NodeSettings`."""

    run_id: str
    member: str
    name: str
    address: str
    slots: int
    node: str = ""
    logs: LogSettings = NO_LOGS
    stop_grace_seconds: float = float(SHUTDOWN_SECONDS)
    announce: bool = False
    warm_start: WarmStart | None = None
    hang_seconds: float = 0.0


class ElasticAgent(ABC):
    """Agent that runs this node's workers of a job, round after round, until the job ends.

    Usage::

        result = agent.run()
        if result.is_failed():
            failure = next(iter(result.failures.values()))
            print(failure.message)
        else:
            print(result.return_values)
    """

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until the job ends, restarting them after failures.

        Returns:
            The result of this node's workers, by global rank.

        Raises:
            SignalException: a signal ended this agent.
            Exception: any cause other than a worker's failure, such as a failed rendezvous or an
                internal error.
        """

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the worker group; the agent modifies it while it runs."""


class SimpleElasticAgent(EventEmitter, ElasticAgent):
    """Agent for one `WorkerSpec`. A subclass starts, stops and monitors the workers.

    Args:
        spec: spec of this node's workers.
        exit_barrier_timeout: maximum seconds to wait for the workers of other nodes after this
            node's have succeeded.
        shutdown_timeout: seconds between SIGTERM and SIGKILL of a worker.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = EXIT_BARRIER_SECONDS,
        shutdown_timeout: int = SHUTDOWN_SECONDS,
    ) -> None:
        super().__init__(WorkerGroup(spec))
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._store: Any = None
        self._budget = RestartBudget()
        self._shell: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ours: HandlerRendezvous | None = None
        self._active_runtime: WorkerRuntime | None = None

    # -- for subclasses ---------------------------------------------------------------

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the group's workers and return their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End all workers in any state, including none at all and stuck ones."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers and return HEALTHY, SUCCEEDED, or FAILED with the failures."""

    @abstractmethod
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_SECONDS
    ) -> None:
        """Free all resources; send running workers `death_sig`, then SIGKILL after `timeout`."""

    def _node(self) -> NodeSettings:
        """Return the settings of this node."""
        spec = self._worker_group.spec
        host, handler = socket.gethostname(), spec.rdzv_handler
        directed = self._directed()
        identity = None if directed is None else directed.identity
        return NodeConfig(
            run_id=str(handler.get_run_id()),
            member=secrets.token_hex(8) if identity is None else identity.id,
            name=f"{host}-{os.getpid()}" if identity is None else identity.name,
            address=spec.local_addr or host,
            slots=spec.local_world_size,
            node=host,
            stop_grace_seconds=float(self._shutdown_timeout),
        )

    def _runtime(self) -> WorkerRuntime:
        """Return the worker runtime; the default calls this class's abstract methods."""
        spec = self._worker_group.spec
        return MethodRuntime(self, self._worker_group, spec.monitor_interval)

    def _adjust_start(self, order: StartWorkers) -> StartWorkers:
        """Adjust the order to start workers before the worker runtime gets it."""
        return order

    def _return_values(self, number: int) -> dict[int, Any]:
        """Return the return values of a successful round's workers, by global rank."""
        if (
            isinstance(self._active_runtime, MethodRuntime)
            and self._active_runtime.result is not None
        ):
            return self._active_runtime.result.return_values
        return {worker.global_rank: None for worker in self._worker_group.workers}

    # -- running ----------------------------------------------------------------------

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        began = time.monotonic()
        death_sig: signal.Signals | None = None
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - began)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        except Exception as error:
            death_sig = getattr(error, "sigval", None)  # SignalException, also torch's
            if trouble_of(error) is not JoinTrouble.LEFT:
                raise
            log.info("[%s] left the rendezvous: %s", self._worker_group.spec.role, error)
            return RunResult(WorkerState.STOPPED)
        finally:
            if self._shell is not None and self._shell.signals.last is not None:
                death_sig = self._shell.signals.last
            call_shutdown(self._shutdown, death_sig, self._shutdown_timeout)
            self._total_execution_time = int(time.monotonic() - began)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the agent to its end in a new event loop."""
        spec = self._worker_group.spec
        log.info("[%s] starting workers of %s", spec.role, spec.get_entrypoint_name())
        self._shell = None
        shell = self.shell
        ending = run_to_end(self)
        fault = None if self._ours is None else self._ours.error
        return run_result(ending, shell, self._worker_group, self._return_values, fault)

    @property
    def shell(self) -> Agent:
        """Agent behind this API, created on first use."""
        if self._shell is None:
            self._ours = None
            self._active_runtime = self._runtime()
            self._shell = Agent(
                self._node(), self._active_runtime, self._enter, WorkerGroupHooks(self)
            )
        return self._shell

    def leave(self, reason: str) -> None:
        """Ask a running agent to leave the job with its node. Thread-safe."""
        if self._loop is None:
            self.shell.leave(reason)
        else:
            self._loop.call_soon_threadsafe(self.shell.leave, reason)

    async def run_in_loop(self) -> Ending:
        """Run the agent in the caller's event loop; return its ending, also where `run` raises."""
        shell, self._loop = self.shell, asyncio.get_running_loop()
        async with PeriodicRecorder(
            self._record_progress, self._worker_group.spec.monitor_interval
        ):
            return await shell.run()

    def _enter(self, state: StateReader) -> Rendezvous:
        """Return this node's rendezvous: the v3 member itself, or an adapter of the handler."""
        spec = self._worker_group.spec
        directed = self._directed()
        if directed is not None:
            hello = state().hello
            assert hello is not None, "the agent enters after it"
            slots, budget = spec.local_world_size, spec.max_restarts
            return directed.member(slots, spec.role, hello.probe_port, budget)
        node = self._node() if self._shell is None else self._shell.settings
        terms = PollingTerms(
            node.member, node.run_id, spec.max_restarts, node.stop_grace_seconds, node.name
        )
        self._ours = HandlerRendezvous(
            terms,
            spec.rdzv_handler,
            self,
            spec.monitor_interval,
            self._exit_barrier_timeout,
        )
        return self._ours

    def _directed(self) -> DirectedHandler | None:
        """Return the handler if it gives directives and no subclass overrides the rendezvous.

        None if `_rendezvous` or `_assign_worker_ranks` is overridden.
        """
        handler, ours, theirs = self._worker_group.spec.rdzv_handler, SimpleElasticAgent, type(self)
        if (
            theirs._rendezvous is not ours._rendezvous
            or theirs._assign_worker_ranks is not ours._assign_worker_ranks
        ):
            return None
        if isinstance(handler, EtcdV3RendezvousHandler):
            handler = self._worker_group.spec.rdzv_handler = DirectedHandler.of(handler)
        return handler if isinstance(handler, DirectedHandler) else None

    def join_round(self, charge: bool, restarts: int, least: int) -> Place:
        """See `polling.join.RoundJoiner`."""
        group = self._worker_group
        self._budget = RestartBudget(restarts, charge)
        self._rendezvous(group)
        group.round = max(group.round, least + 1)
        member = self.shell.settings.member
        return Place(ranks.roster_of(group, member, self._budget.total), group.store)

    # -- steps, also for a custom run loop --------------------------------------------------

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round and assign ranks to this node's workers. Blocks."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            place = join_through_handler(spec.rdzv_handler)
        if place.master is None:  # an old handler: rank 0 writes the address
            if place.group_rank == 0:
                self._set_master_addr_port(
                    place.store, spec.master_addr, spec.master_port, spec.local_addr
                )
            place = place.at(*self._get_master_addr_port(place.store))
        assert place.master is not None
        self._store = worker_group.store = place.store
        shared = agreement_store(place.store)
        self._budget.announce(shared)
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(
                place.store, place.group_rank, place.group_world_size, spec
            )
        self._budget.agree(shared)
        worker_group.group_rank = place.group_rank
        worker_group.group_world_size = place.group_world_size
        worker_group.round = max(place.number, worker_group.round + 1)
        worker_group.master_addr = spec.master_addr or place.master[0]
        worker_group.master_port = spec.master_port or place.master[1]
        self._remaining_restarts = min(
            self._remaining_restarts, spec.max_restarts - self._budget.total
        )
        log.info(
            "[%s] rendezvous %d: group rank %d of %d, workers %s, master %s:%d",
            spec.role, worker_group.round, place.group_rank, place.group_world_size,
            worker_group.workers, worker_group.master_addr, worker_group.master_port,
        )  # fmt: skip

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this node's workers with ranks that all agents agree on through the store.

        If all nodes are identical (TORCH_ELASTIC_WORKER_IDENTICAL=1), the ranks are computed
        without the store.
        """
        slots = spec.local_world_size
        mine = RoleInstanceInfo(spec.role, group_rank, slots)
        known = known_ranks(spec.rdzv_handler, group_rank, slots)
        return ranks.ranked_workers(assign_ranks(store, mine, group_world_size, known), slots)

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

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Join the next round and start new workers in it. No earlier worker may still run."""
        self._rendezvous(worker_group)
        for local_rank, id_ in self._start_workers(worker_group).items():
            worker_group.workers[local_rank].id = id_
        self._record_start()
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """End the workers and start new ones in the next round."""
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait until the workers of all agents have ended; log errors instead of raising them."""
        group, began = self._worker_group, time.monotonic()
        assert group.group_world_size is not None, "there was no rendezvous"
        try:
            barrier(
                self._store,
                group.group_world_size,
                TERMINAL_STATE_SYNC_ID,
                self._exit_barrier_timeout,
            )
        except Exception as error:
            if getattr(error, "sigval", None) is not None:  # SignalException, also torch's
                raise
            waited = time.monotonic() - began
            log.exception("gave up waiting for the other agents after %.1f s", waited)

    def _record_start(self) -> None:
        for worker in self._worker_group.workers:
            self._record_event("START", EventSource.WORKER, worker)


class WorkerGroupHooks(AgentHooks):
    """Hooks that keep an agent's worker group in step with the state of its shell."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self._agent = agent

    def adjust_start(self, order: StartWorkers) -> StartWorkers:
        own = isinstance(self._agent._active_runtime, MethodRuntime)
        return order if own else self._agent._adjust_start(order)

    def observed(self, state: State, event: Event) -> None:
        agent = self._agent
        if isinstance(state.directive, Run):
            left = agent.get_worker_group().spec.max_restarts - state.directive.roster.restarts
            agent._remaining_restarts = min(agent._remaining_restarts, max(0, left))
        if ranks.update_group(agent.get_worker_group(), state, event):
            agent._record_start()
