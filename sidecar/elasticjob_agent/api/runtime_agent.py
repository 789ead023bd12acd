"""Elastic agents over a worker runtime, local or in the container beside this process.

`run` passes the runtime to the agent. Steps that are called one by one use the same kind of
runtime, and if a subclass overrides steps, `run` uses those.
"""

from __future__ import annotations

import contextlib
import math
import signal
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from elasticjob_agent.api import ranks
from elasticjob_agent.api.agent import EXIT_BARRIER_SECONDS, SHUTDOWN_SECONDS, SimpleElasticAgent
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.spec import (
    ProcessFailure,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_agent.core.model import StartGroup
from elasticjob_agent.core.polling import PollingState
from elasticjob_agent.ports import NodeSettings
from elasticjob_agent.threads import BlockingRuntime
from elasticjob_agent.worker_files import RunLogs
from elasticjob_agent.worker_groups import start_workers
from elasticjob_agent.worker_runtime import WorkerRuntime, WorkerRuntimeError

STEPS = ("_start_workers", "_stop_workers", "_monitor_workers")


class RuntimeElasticAgent(SimpleElasticAgent):
    """Agent over a worker runtime that a subclass creates."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = EXIT_BARRIER_SECONDS,
        shutdown_timeout: int = SHUTDOWN_SECONDS,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._blocking: BlockingRuntime | None = None

    @abstractmethod
    def _make_runtime(self) -> WorkerRuntime:
        """Create a worker runtime."""

    def _is_stuck(self) -> bool:
        """Return True if a worker can neither continue nor be restarted on this machine."""
        return False

    def _runtime(self) -> WorkerRuntime:
        own = any(getattr(type(self), s) is not getattr(RuntimeElasticAgent, s) for s in STEPS)
        return super()._runtime() if own else self._make_runtime()

    @prof(name="LocalElasticAgent._start_workers")
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._blocking is None:
            self._blocking = BlockingRuntime(self._make_runtime)
        node = self._node()
        logs = RunLogs(node.logs)
        roster = ranks.roster_of(worker_group, node.member, self._restarts, self._master_served)
        assignment = roster.assignment(node.member)
        assert assignment is not None, "roster_of includes this node"
        logs.prepare(roster.number, assignment.slots, assignment.base_rank)
        order = start_workers(
            StartGroup(roster, assignment, worker_group.spec.max_restarts),
            self._blocking.hello,
            logs,
            None,
            node.run_id,
            node.logs.stream_bytes(assignment.slots),
            dumps=False,
        )
        return dict(self._blocking.start(self._adjust_start(order)))

    @prof(name="LocalElasticAgent._stop_workers")
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._blocking is not None:
            self._blocking.stop(float(self._shutdown_timeout))

    @prof(name="LocalElasticAgent._monitor_workers")
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._blocking is None:
            return RunResult(WorkerState.UNKNOWN)
        exits = self._blocking.exits
        logs = RunLogs(self._node().logs)
        failures = {}
        for local_rank, exit_ in exits.items():
            if exit_.exit_code == 0:
                continue
            path = logs.error_file(worker_group.round, local_rank)
            code = -exit_.signal if exit_.signal is not None else exit_.exit_code
            failures[worker_group.workers[local_rank].global_rank] = ProcessFailure(
                local_rank, exit_.pid, code or 1, "" if path is None else str(path)
            )
        if failures:
            return RunResult(WorkerState.FAILED, {}, failures)
        if len(exits) < len(worker_group.workers):
            return RunResult(WorkerState.UNHEALTHY if self._is_stuck() else WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, self._return_values(worker_group.round))

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = SHUTDOWN_SECONDS
    ) -> None:
        """End the workers that `_start_workers` started. Those of `run` have already ended."""
        blocking, self._blocking = self._blocking, None
        if blocking is not None:
            with contextlib.suppress(WorkerRuntimeError, TimeoutError):
                blocking.signal(death_sig)
                blocking.stop(float(timeout))
            blocking.close()


class NodeElasticAgent(RuntimeElasticAgent):
    """Agent of a pod and of `elasticjob agent`, with a given node and worker runtime.

    A finished member waits as long as the others work: its exit would count as the job's end.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        node: NodeSettings,
        runtime: WorkerRuntime,
        stepped: Callable[[PollingState, PollingState], None] | None = None,
    ) -> None:
        super().__init__(spec, math.inf)
        self._stepped = stepped
        self._given_node = node
        self._given_runtime = runtime

    def _node(self) -> NodeSettings:
        return self._given_node

    def _make_runtime(self) -> WorkerRuntime:
        return self._given_runtime

    def _served_port(self) -> int:
        state = self.shell.progress.state
        return state.port if state.served else 0
