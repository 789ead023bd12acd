"""Public data types of the elastic agent API: specs, workers, worker groups, results, failures.

Names, fields and defaults are those of torch's elastic agent, so that code written for it only
needs to change its imports.
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from elasticjob_agent.api.events import NOWHERE
from elasticjob_agent.core.error_reports import from_error_file
from elasticjob_agent.core.failures import SIGNALS
from elasticjob_agent.worker_files import read_error_file
from elasticjob_agent.worker_output import Std as Std  # torch has it beside the specs

NOT_AVAILABLE = "<N/A>"
_NO_ERROR_FILE: Mapping[str, Any] = {"message": "<NONE>"}


class SignalException(Exception):
    """Signal (`sigval`) that asked the agent to end; the agent has ended its workers."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval


@dataclass
class ProcessFailure:
    """Failure of a worker, with the content of its error file.

    Args:
        local_rank: local rank of the worker.
        pid: process id of the worker.
        exitcode: exit code; negative signal number if a signal killed the worker.
        error_file: path of the error file; "<N/A>" if there is no readable one.
        error_file_data: content of the error file.
        message: message of the error file; else a description of the exit code.
        timestamp: time of the failure in Unix seconds; the current time without an error file.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        """Read the error file. A malformed one counts as missing, since user code writes it."""
        raw = read_error_file(Path(self.error_file)) if self.error_file else None
        error_report = None if raw is None else from_error_file(raw)
        if raw is None or error_report is None:
            self.error_file = NOT_AVAILABLE
            self.error_file_data = dict(_NO_ERROR_FILE)
            self.timestamp = int(time.time())
            self.message = self._from_exit_code()
            return
        self.error_file_data = json.loads(raw.decode(errors="replace"))
        self.message = self.error_file_data["message"]
        at_ms = error_report.at_ms
        self.timestamp = int(time.time()) if at_ms is None else at_ms // 1000

    @property
    def has_report(self) -> bool:
        """True if the worker left a valid error file."""
        return self.error_file != NOT_AVAILABLE

    def _from_exit_code(self) -> str:
        if self.exitcode < 0:
            return f"process {self.pid} was killed by {self.signal_name()}"
        return f"process {self.pid} ended with exit code {self.exitcode} and left no error file"

    def signal_name(self) -> str:
        """Return the name of the signal that killed the worker, or "<N/A>"."""
        return SIGNALS.get(-self.exitcode, NOT_AVAILABLE) if self.exitcode < 0 else NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the local time of the failure, as YYYY-MM-DD_HH:MM:SS."""
        return datetime.fromtimestamp(self.timestamp).isoformat(sep="_")


DEFAULT_ROLE = "default"


@dataclass
class DefaultLogsSpecs:
    """Destination of the workers' output.

    Args:
        log_dir: parent of a new folder with the files `round_<n>/<local_rank>/`. None uses a
            temporary folder, which is removed if the run succeeds; the null device keeps no files.
        redirects: streams that go to files only.
        tee: streams that go to files and to the console; overrides `redirects`.
        local_ranks_filter: local ranks whose output is shown on the console; None shows all.
    """

    log_dir: str | None = None
    redirects: Std | Mapping[int, Std] = Std.NONE
    tee: Std | Mapping[int, Std] = Std.NONE
    local_ranks_filter: set[int] | None = None


def logs_specs_of(given: Any) -> DefaultLogsSpecs:
    """Return the given specs, converted if they are torch's."""
    if isinstance(given, DefaultLogsSpecs):
        return given
    return DefaultLogsSpecs(
        given.root_log_dir, given._redirects, given._tee, given._local_ranks_filter
    )


class WorkerState(StrEnum):
    """State of a worker group, common to all its workers.

    INIT, then HEALTHY or UNHEALTHY while they run; STOPPED between two rounds, after the agent
    ended them to restart them; finally SUCCEEDED or FAILED. UNKNOWN: the agent lost track of the
    workers and should end.
    """

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return True if the workers' processes run, healthy or not."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


@dataclass
class WorkerSpec:
    """Specification of a node's workers of one role.

    Args:
        role: role of the workers.
        local_world_size: number of workers on this node, at least 1.
        rdzv_handler: `RendezvousHandler` of ElasticJob or torch.
        fn: deprecated, use `entrypoint`.
        entrypoint: a function, or the path of a program.
        args: its arguments; `${local_rank}` in a string argument is replaced by the local rank.
        max_restarts: restart budget, the maximum number of failures that lead to a restart.
        monitor_interval: polling interval of the rendezvous in seconds (and of workers that a
            subclass of `SimpleElasticAgent` runs itself).
        master_port, master_addr: address of torch's store on rank 0; the default is chosen by the
            rendezvous in every round.
        local_addr: address of this node.
        redirects: streams that go to files only.
        tee: streams that go to files and to the console; overrides `redirects`.
        event_log_handler: destination of events: null, console, or a registered name.
        numa_options: must be None.
        duplicate_stdout_filters, duplicate_stderr_filters: must be None.
        virtual_local_rank: every worker sees a single GPU as device 0, and has LOCAL_RANK 0.

    Raises:
        ValueError: an argument is out of range or not supported, or there is no entrypoint.
    """

    role: str
    local_world_size: int
    rdzv_handler: Any
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 30.0
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    redirects: Std | Mapping[int, Std] = Std.NONE
    tee: Std | Mapping[int, Std] = Std.NONE
    event_log_handler: str = NOWHERE
    numa_options: None = None
    duplicate_stdout_filters: None = None
    duplicate_stderr_filters: None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise ValueError(f"local_world_size must be at least 1, not {self.local_world_size}")
        if self.monitor_interval <= 0:
            raise ValueError(f"monitor_interval must be above 0, not {self.monitor_interval:g}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, not {self.max_restarts}")
        for name in ("numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not supported: leave it out")
        if self.fn is not None:
            warnings.warn(
                "WorkerSpec.fn is deprecated: use entrypoint", DeprecationWarning, stacklevel=3
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise ValueError("entrypoint must be a function or the path of a program")

    def get_entrypoint_name(self) -> str:
        """Return the function's qualified name, or the program's file name."""
        if isinstance(self.entrypoint, str):
            return PurePath(self.entrypoint).name
        assert self.entrypoint is not None
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))


class Worker:
    """Worker of a group.

    Args:
        local_rank: rank among the workers of this agent.
        global_rank: rank among all workers; may change every round.
        role_rank: rank among all workers of its role.
        world_size: number of all workers.
        role_world_size: number of workers of its role.

    `id` is the agent's id of the worker: its process id if it runs on this machine.
    """

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerGroup:
    """Workers of a spec that one agent runs. The agent modifies it while it runs."""

    __slots__ = (
        "group_rank", "group_world_size", "master_addr", "master_port", "round", "spec", "state",
        "store", "workers",
    )  # fmt: skip

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=index) for index in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.round = 0
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """Result of a run: SUCCEEDED if, and only if, all local workers succeeded.

    Args:
        state: final state of the worker group.
        return_values: return values of functions by global rank; None for programs.
        failures: failures by global rank.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED
