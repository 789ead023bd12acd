"""`LocalElasticAgent`: runs functions or programs as workers on this machine.

`run` passes a worker runtime to the agent. Steps that are called one by one use the same kind of
runtime, and if a subclass overrides steps, `run` uses those.

A function runs in a program that calls it or, with `fork`, in a fork of this process. Workers
stuck in uninterruptible sleep in the kernel are detected: no signal ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticjob_agent.api import ranks
from elasticjob_agent.api.agent import (
    EXIT_BARRIER_SECONDS,
    SHUTDOWN_SECONDS,
    NodeConfig,
    SimpleElasticAgent,
)
from elasticjob_agent.api.metrics import prof
from elasticjob_agent.api.spec import (
    DEFAULT_ROLE,
    DefaultLogsSpecs,
    ProcessFailure,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
    logs_specs_of,
)
from elasticjob_agent.core.commands import StartGroup
from elasticjob_agent.core.state import Ending
from elasticjob_agent.ports import NodeSettings
from elasticjob_agent.runtimes.forked import ForkedRuntime
from elasticjob_agent.runtimes.function_entrypoint import CallFolder, FunctionCall, with_local_rank
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.settings import LogSettings, uninterruptible_seconds
from elasticjob_agent.tempdirs import TempDir
from elasticjob_agent.threads import BlockingRuntime
from elasticjob_agent.worker_files import RunLogs
from elasticjob_agent.worker_groups import start_workers
from elasticjob_agent.worker_output import Std, WorkerOutput, single_device, streams_of
from elasticjob_agent.worker_runtime import (
    StartWorkers,
    WorkerRuntime,
    WorkerRuntimeError,
    WorkerStart,
)
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger("elasticjob.agent")

_UNINTERRUPTIBLE = "D"


class StuckWorkers(Exception):
    """Worker in uninterruptible sleep for longer than the timeout."""


def sleep_timeout(given: float | None) -> float:
    """Return the timeout in seconds, as given or else from the environment; 0 disables it.

    As in torch, a negative value, or a variable that is not a number, counts as 0.
    """
    if given is not None:
        return max(0.0, float(given))
    try:
        return max(0.0, float(uninterruptible_seconds()))
    except ValueError:
        return 0.0


class SleepDetector:
    """Start times of the uninterruptible sleeps of workers, as observed."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._since: dict[int, float] = {}

    def stuck(self, pids: Collection[int], now: float) -> list[int]:
        """Check processes; return those beyond the timeout. `now` is in monotonic seconds."""
        if self.timeout_seconds <= 0:
            return []
        uninterruptible = {pid for pid in pids if _process_state(pid) == _UNINTERRUPTIBLE}
        self._since = {pid: self._since.get(pid, now) for pid in uninterruptible}
        found = [pid for pid, at in self._since.items() if now - at >= self.timeout_seconds]
        for pid in found:
            log.error("worker %d is in uninterruptible sleep for %g s", pid, now - self._since[pid])
        return found


def _process_state(pid: int) -> str:
    """Return the state letter of a process from /proc; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


LOOK_SECONDS = 1.0
"""Maximum interval between checks for workers that are stuck in the kernel."""
START_METHODS = ("spawn", "fork", "forkserver")
STEPS = ("_start_workers", "_stop_workers", "_monitor_workers")


class LocalElasticAgent(SimpleElasticAgent):
    """Agent that runs the spec's workers as its child processes, each in its own process group.

    Args:
        spec: spec of the workers.
        logs_specs: destination of their output; the default is `redirects` and `tee` of the spec.
        start_method: start method of functions. With `fork` they inherit this process's memory;
            with `spawn`, and `forkserver`, which is the same here, they must be importable and
            their arguments picklable.
        exit_barrier_timeout: maximum seconds to wait for the workers of other nodes after this
            node's have succeeded.
        log_line_prefix_template: prefix of every line on the console, in which `${role_name}`,
            `${local_rank}` and `${rank}` are replaced. The default is `[<role><local rank>]:` for
            output that is copied to a file, else nothing.
        shutdown_timeout: seconds between SIGTERM and SIGKILL of a worker.
        health_check_server: must be None.
        uninterruptible_state_timeout: maximum seconds of a worker in uninterruptible sleep, after
            which the run ends UNHEALTHY and without a restart, as in torch; 0 means no limit. The
            default is TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT.

    Raises:
        ValueError: an argument is not supported, or a worker has no device.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: DefaultLogsSpecs | None = None,
        start_method: str = "spawn",
        exit_barrier_timeout: float = EXIT_BARRIER_SECONDS,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = SHUTDOWN_SECONDS,
        health_check_server: None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        if health_check_server is not None:
            raise ValueError("health_check_server is not supported: leave it out")
        self._sleepers = SleepDetector(sleep_timeout(uninterruptible_state_timeout))
        if start_method not in START_METHODS:
            known = ", ".join(START_METHODS)
            raise ValueError(f"start_method must be one of {known}, not {echoed(start_method)}")
        self._start_method = start_method
        if logs_specs is None:  # torch's own spec has neither attribute
            redirects, tee = (getattr(spec, name, Std.NONE) for name in ("redirects", "tee"))
            logs_specs = DefaultLogsSpecs(redirects=redirects, tee=tee)
        self._logs_specs = logs_specs_of(logs_specs)
        self._log_line_prefix_template = log_line_prefix_template
        self._scratch: TempDir | None = None
        self._call_folder: CallFolder | None = None
        self._settings: NodeConfig | None = None
        self._blocking: BlockingRuntime | None = None
        self._devices(spec.local_world_size - 1)  # raise for too few devices before the first round

    # -- workers that are stuck in the kernel -------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except StuckWorkers as error:
            log.error("[%s] %s", self._worker_group.spec.role, error)
            self._worker_group.state = WorkerState.FAILED
            return RunResult(WorkerState.UNHEALTHY)

    async def run_in_loop(self) -> Ending:
        if self._sleepers.timeout_seconds <= 0:
            return await super().run_in_loop()
        life = asyncio.create_task(super().run_in_loop())
        interval_seconds = min(self._worker_group.spec.monitor_interval, LOOK_SECONDS)
        try:
            while not life.done():
                await asyncio.wait([life], timeout=interval_seconds)
                if not life.done() and self._is_stuck():
                    raise StuckWorkers("a worker is stuck in the kernel: not restarting it")
            return life.result()
        finally:
            life.cancel()
            await asyncio.wait([life])

    def _is_stuck(self) -> bool:
        """Return True if a worker can neither continue nor be restarted on this machine."""
        pids = [worker.id for worker in self._worker_group.workers if isinstance(worker.id, int)]
        if not self._sleepers.stuck(pids, time.monotonic()):
            return False
        self._remaining_restarts = 0  # it holds resources that a new worker here would need
        return True

    # -- for the agent ------------------------------------------------------------------

    def _node(self) -> NodeSettings:
        if self._settings is None:
            node = super()._node()
            assert isinstance(node, NodeConfig)
            self._settings = replace(node, logs=LogSettings(self._made_log_folder(node.run_id)))
        return self._settings

    def _runtime(self) -> WorkerRuntime:
        own = any(getattr(type(self), s) is not getattr(LocalElasticAgent, s) for s in STEPS)
        return super()._runtime() if own else self._make_runtime()

    def _make_runtime(self) -> WorkerRuntime:
        """Create a worker runtime."""
        spec = self._worker_group.spec
        if isinstance(spec.entrypoint, str):
            return LocalRuntime((spec.entrypoint,))
        assert spec.entrypoint is not None
        call = FunctionCall(spec.entrypoint, spec.args)
        if self._scratch is None:
            self._scratch = TempDir("call")
        folder = self._call_folder = self._call_folder or CallFolder(self._scratch.path)
        if self._start_method == "fork":
            return ForkedRuntime(call, folder)
        return LocalRuntime(keep_fds=folder.write(call))

    def _adjust_start(self, order: StartWorkers) -> StartWorkers:
        workers = tuple(self._adjust_worker(order.round, worker) for worker in order.workers)
        return replace(order, workers=workers)

    def _adjust_worker(self, number: int, worker: WorkerStart) -> WorkerStart:
        specs, local_rank = self._logs_specs, worker.local_rank
        template = self._log_line_prefix_template
        if template is None:
            template = "[${role_name}${local_rank}]:" if streams_of(specs.tee, local_rank) else ""
        role = self._worker_group.spec.role
        output = WorkerOutput(specs.redirects, specs.tee, specs.local_ranks_filter, template, role)
        argv, env = self._argv(number, local_rank), {**worker.env, **self._devices(local_rank)}
        return output.adjust(replace(worker, argv=argv, env=env))

    def _argv(self, number: int, local_rank: int) -> tuple[str, ...]:
        spec = self._worker_group.spec
        if isinstance(spec.entrypoint, str):
            args = with_local_rank(spec.args, local_rank)
            return (spec.entrypoint, *(str(arg) for arg in args))
        which = (str(number), str(local_rank))
        if self._start_method == "fork":
            return which
        assert self._call_folder is not None, "_make_runtime sets it"
        return (*self._call_folder.command(), *which)

    def _devices(self, local_rank: int) -> dict[str, str]:
        """Return the variables that show a worker one device, with `virtual_local_rank`."""
        return single_device(local_rank) if self._worker_group.spec.virtual_local_rank else {}

    def _return_values(self, number: int) -> dict[int, Any]:
        folder = self._call_folder
        if folder is None or not folder.path.exists():
            return super()._return_values(number)
        return {
            worker.global_rank: folder.value(number, worker.local_rank)
            for worker in self._worker_group.workers
        }

    # -- steps, for a custom run loop -----------------------------------------------------

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._blocking is None:
            self._blocking = BlockingRuntime(self._make_runtime)
        node = self._node()
        logs = RunLogs(node.logs)
        roster = ranks.roster_of(worker_group, node.member, self._restarts)
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

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._blocking is not None:
            self._blocking.stop(float(self._shutdown_timeout))

    @prof
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
        scratch, self._scratch, self._call_folder = self._scratch, None, None
        if scratch is not None:
            scratch.close()
        logs = None if self._settings is None else self._settings.logs.folder
        succeeded = self._worker_group.state == WorkerState.SUCCEEDED
        if logs is not None and succeeded and self._logs_specs.log_dir is None:
            shutil.rmtree(logs, ignore_errors=True)  # the caller requested no logs
            self._settings = None

    def _made_log_folder(self, run_id: str) -> Path | None:
        """Create the log folder. Error files need one even if no output is kept."""
        log_dir = self._logs_specs.log_dir
        if log_dir == os.devnull:
            return None
        run_id = run_id.replace("/", "_")
        if log_dir is not None:
            folder = Path(log_dir).absolute()  # a worker may change its directory
            folder.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=folder))
        return Path(tempfile.mkdtemp(prefix=f"elasticjob_{run_id}_"))
