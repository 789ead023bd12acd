"""The elastic agent as torch has it: `ElasticAgent`, and `SimpleElasticAgent` to build on.

`run` is the agent that ElasticJob's pods run (`elasticjob_agent.agent.Agent` around
`core.step`). The methods named as in torch are its steps: `run` calls those that stand for
one thing (`_rendezvous`, `_assign_worker_ranks`, `_start_workers`, `_stop_workers`,
`_monitor_workers`), and a loop of one's own may call all of them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticjob_agent.agent import Agent
from elasticjob_agent.api import places
from elasticjob_agent.api.budget import Budget
from elasticjob_agent.api.directed import DirectedHandler
from elasticjob_agent.api.events import EventSource
from elasticjob_agent.api.following import HandlerRendezvous
from elasticjob_agent.api.living import Watching, live, result_of
from elasticjob_agent.api.looking import trouble_of
from elasticjob_agent.api.methods import MethodHands
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.node import SHUTDOWN_SECONDS, Node
from elasticjob_agent.api.placing import Placing
from elasticjob_agent.api.seeking import Place
from elasticjob_agent.api.spec import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_agent.api.stores import TERMINAL_STATE_SYNC_ID, barrier
from elasticjob_agent.core.following import Following, Terms, Trouble
from elasticjob_agent.core.model import Ending, Event, State
from elasticjob_agent.hands import Hands, StartWorkers
from elasticjob_agent.surroundings import Attendant, NodeSettings, Rendezvous
from elasticjob_rendezvous.core.directives import Run
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler

log = logging.getLogger("elasticjob.agent")

EXIT_BARRIER_SECONDS = 300.0


class ElasticAgent(ABC):
    """Runs this node's workers of a job, round after round, until the job ends.

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
        """Run to the end of the job, beginning anew after failures.

        Returns:
            How the workers here ended, by global rank.

        Raises:
            Exception: anything that is not a worker's failure: no rendezvous came about,
                a signal told this agent to end (`SignalException`), or a fault.
        """

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The workers; the agent changes them as it goes."""


class SimpleElasticAgent(Placing, ElasticAgent):
    """An agent for one spec. A subclass says how workers are started, stopped and looked after.

    Args:
        exit_barrier_timeout: seconds that workers of other nodes may take longer than ours.
        shutdown_timeout: seconds that workers get between SIGTERM and SIGKILL.
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
        self._shell: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ours: HandlerRendezvous | None = None
        self._hands_now: Hands | None = None
        self._stepped: Callable[[Following, Following], None] | None = None

    # -- for subclasses to say --------------------------------------------------------

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the group's workers; their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End all workers, whatever state they are in: also none, also stuck ones."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers: HEALTHY, SUCCEEDED, or FAILED with the failures."""

    @abstractmethod
    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_SECONDS
    ) -> None:
        """Free everything; workers that still run get this signal, then SIGKILL."""

    def _node(self) -> NodeSettings:
        """What the agent is told of this node."""
        spec = self._worker_group.spec
        host, handler = socket.gethostname(), spec.rdzv_handler
        directed = self._directed()
        identity = None if directed is None else directed.identity
        return Node(
            run_id=str(handler.get_run_id()),
            member=secrets.token_hex(8) if identity is None else identity.id,
            name=f"{host}-{os.getpid()}" if identity is None else identity.name,
            address=spec.local_addr or host,
            slots=spec.local_world_size,
            node=host,
            stop_grace_seconds=float(self._shutdown_timeout),
        )

    def _hands(self) -> Hands:
        """Where workers run: by default, wherever the four methods say."""
        spec = self._worker_group.spec
        return MethodHands(self, self._worker_group, spec.monitor_interval)

    def _dressed(self, order: StartWorkers) -> StartWorkers:
        """The last word on how workers are started, where hands start them.

        A handler may host torch's store at MASTER_*: then no worker must.
        """
        if not getattr(self._worker_group.spec.rdzv_handler, "use_agent_store", False):
            return order
        env = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        workers = tuple(replace(worker, env={**worker.env, **env}) for worker in order.workers)
        return replace(order, workers=workers)

    def _return_values(self, number: int) -> dict[int, Any]:
        """What the workers of a round that succeeded returned, by global rank."""
        if isinstance(self._hands_now, MethodHands) and self._hands_now.result is not None:
            return self._hands_now.result.return_values
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
            death_sig = getattr(error, "sigval", None)  # of a SignalException, ours or torch's
            if trouble_of(error) is not Trouble.LEFT:
                raise
            log.info("[%s] left the rendezvous: %s", self._worker_group.spec.role, error)
            return RunResult(WorkerState.STOPPED)
        finally:
            if self._shell is not None and self._shell.signals.last is not None:
                death_sig = self._shell.signals.last
            self._end(death_sig)
            self._total_execution_time = int(time.monotonic() - began)

    def _end(self, death_sig: signal.Signals | None) -> None:
        """Call `_shutdown` with what the subclass's takes: of old it had no timeout."""
        takes = inspect.signature(self._shutdown).parameters.values()
        options: dict[str, Any] = {}
        if any(each.name == "timeout" or each.kind is each.VAR_KEYWORD for each in takes):
            options["timeout"] = self._shutdown_timeout
        if death_sig is None:
            self._shutdown(**options)
        else:
            self._shutdown(death_sig, **options)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the agent to its end, in an event loop of its own."""
        spec = self._worker_group.spec
        log.info("[%s] starting workers of %s", spec.role, spec.get_entrypoint_name())
        self._shell = None
        shell = self.shell
        ending = live(self)
        fault = None if self._ours is None else self._ours.error
        return result_of(ending, shell, self._worker_group, self._return_values, fault)

    @property
    def shell(self) -> Agent:
        """The agent itself: what it does, and how to tell it to leave."""
        if self._shell is None:
            self._ours = None
            self._hands_now = self._hands()
            self._shell = Agent(self._node(), self._hands_now, self._enter, Attends(self))
        return self._shell

    @property
    def alone(self) -> bool:
        """Whether the workers here are done, and nobody knows of the others'."""
        return self._ours is not None and self._ours.alone

    def leave(self, reason: str) -> None:
        """Tell a running agent that its node is to go; from any thread."""
        if self._loop is None:
            self.shell.leave(reason)
        else:
            self._loop.call_soon_threadsafe(self.shell.leave, reason)

    async def lived(self) -> Ending:
        """`run` for who has an event loop: the agent's end, which is no exception."""
        shell, self._loop = self.shell, asyncio.get_running_loop()
        async with Watching(self._record_progress, self._worker_group.spec.monitor_interval):
            return await shell.run()

    def _enter(self, launcher_port: int) -> Rendezvous:
        """Our part in the rendezvous: the v3 member itself, or one made of a handler's answers."""
        spec = self._worker_group.spec
        directed = self._directed()
        if directed is not None:
            slots, budget = spec.local_world_size, spec.max_restarts
            return directed.member(slots, spec.role, launcher_port, budget)
        node = self._node() if self._shell is None else self._shell.settings
        terms = Terms(
            node.member, node.run_id, spec.max_restarts, node.stop_grace_seconds, node.name
        )
        self._ours = HandlerRendezvous(
            terms,
            spec.rdzv_handler,
            self,
            spec.monitor_interval,
            self._exit_barrier_timeout,
            self._stepped,
        )
        return self._ours

    def _directed(self) -> DirectedHandler | None:
        """The handler if it can direct, and no subclass has its own way to a place or ranks."""
        handler, ours, theirs = self._worker_group.spec.rdzv_handler, Placing, type(self)
        if (
            theirs._rendezvous is not ours._rendezvous
            or theirs._assign_worker_ranks is not ours._assign_worker_ranks
        ):
            return None
        if isinstance(handler, EtcdV3RendezvousHandler):
            handler = self._worker_group.spec.rdzv_handler = DirectedHandler.of(handler)
        return handler if isinstance(handler, DirectedHandler) else None

    def seek(self, charge: bool, restarts: int, least: int) -> Place:
        """See `seeking.Seeker`."""
        group = self._worker_group
        self._budget = Budget(restarts, charge)
        self._rendezvous(group)
        group.round = max(group.round, least + 1)
        member = self.shell.settings.member
        total, served = self._budget.total, self._master_served
        return Place(places.roster_of(group, member, total, served), group.store)

    # -- steps, for a loop of one's own ---------------------------------------------------

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """A place in the next round, then new workers in it. None may run any more."""
        self._rendezvous(worker_group)
        for local_rank, id_ in self._start_workers(worker_group).items():
            worker_group.workers[local_rank].id = id_
        self._record_start()
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """End the workers, and start new ones in the next round."""
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait until the workers of all agents have ended; what goes wrong is only logged."""
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
            if getattr(error, "sigval", None) is not None:  # a SignalException, ours or torch's
                raise
            waited = time.monotonic() - began
            log.exception("gave up waiting for the other agents after %.1f s", waited)

    def _record_start(self) -> None:
        for worker in self._worker_group.workers:
            self._record_event("START", EventSource.WORKER, worker)


class Attends(Attendant):
    """Keeps the worker group of an agent in step with its shell."""

    def __init__(self, agent: SimpleElasticAgent) -> None:
        self._agent = agent

    def dressed(self, order: StartWorkers) -> StartWorkers:
        own = isinstance(self._agent._hands_now, MethodHands)
        return order if own else self._agent._dressed(order)

    def observed(self, state: State, event: Event) -> None:
        agent = self._agent
        if isinstance(state.directive, Run):
            left = agent.get_worker_group().spec.max_restarts - state.directive.roster.restarts
            agent._remaining_restarts = min(agent._remaining_restarts, max(0, left))
        if places.observe(agent.get_worker_group(), state, event):
            agent._record_start()
