"""Worker runtime port: commands from the agent to run workers, and the events it gets back.

Two implementations: `runtimes.local.LocalRuntime` (below the agent's own process) and
`runtimes.launcher_client.LauncherClient` (through the launcher in the training container). The
agent's core depends on this module alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


class WorkerRuntimeError(Exception):
    """Command that the worker runtime could not take: it is not connected, or no longer."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Start parameters of a worker.

    `env` overrides the runtime's own environment. `log_dir` receives `stdout.log` and `stderr.log`
    ("" for none); `prefix`, such as "[0] ", begins every forwarded line. Streams (1 is standard
    output, 2 standard error) in `unlogged` get no file; those in `silent` are not forwarded.
    """

    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_dir: str
    prefix: str
    unlogged: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of a round; `max_log_bytes` is the disk limit of each log stream."""

    round: int
    workers: tuple[WorkerStart, ...]
    max_log_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareWorkers:
    """Preload an interpreter from which workers of this command are forked.

    `env` holds the variables that all workers share. `modules` are loaded beside those that the
    launcher detects. The file `memory` keeps the detected modules; "" keeps nothing.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    modules: tuple[str, ...] = ()
    memory: str = ""


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """Order to run the command once for the node; torchrun in it starts the workers.

    `env` overrides the launcher's own environment.
    """

    env: Mapping[str, str]
    log_dir: str
    max_log_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """End of a worker: by exit code or by signal, never both.

    A command that could not be started is an exit with code 127 (not found) or 126 (not
    executable), pid 0 and a `message` that names the fix. `stderr_tail` is the end of its standard
    error, at most 16 KiB, or 64 KiB if it was asked to dump its stacks. `out_of_memory`: the kernel
    killed a process in the workers' cgroup for lack of memory before this worker ended; the
    `message` then names it. `unasked`: the runtime killed the round itself because its agent was
    gone.
    """

    round: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    at_unix_ms: int
    message: str = ""
    stderr_tail: str = ""
    out_of_memory: bool = False
    unasked: bool = False


@dataclass(frozen=True, slots=True)
class Hello:
    """State of the worker runtime, sent on connection and again after each reconnection.

    It replaces all earlier knowledge. `running` is the round whose process groups are not empty, if
    any; `pids` are its running workers by local rank; `exits` are all exits of the round started
    last (running or not), so that a restarted agent gets the exits it missed. `env_names` are the
    variables set in the base environment. `warms`: the runtime supports `prepare`. `save_signal` is
    the signal that the user chose to request checkpoints; 0 for none. `live_until` is the workers'
    deadline on the monotonic clock; None for none. `slots` is the number of workers that the
    launcher counted; None if it did not count. `node_launch` is the launcher's reason to run the
    command once for the node, found in the program's files; empty for none. `stuck` is the message
    of a `WorkersStuck` of the round started last; empty for none.
    """

    argv: tuple[str, ...]
    pid: int
    python: str
    cwd: str
    probe_port: int
    running: int | None
    pids: Mapping[int, int] = field(default_factory=dict)
    exits: tuple[WorkerExited, ...] = ()
    env_names: frozenset[str] = frozenset()
    warms: bool = False
    save_signal: int = 0
    live_until: float | None = None
    slots: int | None = None
    node_launch: str = ""
    stuck: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of `prepare`: ready, or failed for `reason`, in which case workers start cold."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreServed:
    """Port of a store that this node serves, to be MASTER_PORT of the next round; 0 for none."""

    port: int


@dataclass(frozen=True, slots=True)
class Started:
    """Start of the round's workers.

    A worker that could not be started has no pid; its exit follows. `warm`: all were forked from
    the preloaded interpreter; else `cold_reason` has the reason.
    """

    round: int
    pids: Mapping[int, int]
    warm: bool = False
    cold_reason: str = ""


@dataclass(frozen=True, slots=True)
class StartRefused:
    """Refusal to start a round: processes of another round still exist, nothing was started."""

    round: int
    message: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """End of a round: all processes of its process groups have ended and were reaped.

    Sent once when the groups become empty for any reason, and in answer to every `stop` of a round
    that does not run.
    """

    round: int


@dataclass(frozen=True, slots=True)
class WorkersStuck:
    """End of a round, instead of `Stopped`, although the kernel has not ended some processes.

    They wait uninterruptibly in the kernel, as for a disk that does not answer, and run no more:
    SIGKILL is pending for each of their threads. No other round can start here.
    """

    round: int
    message: str


@dataclass(frozen=True, slots=True)
class LauncherSignalled:
    """SIGTERM received by the launcher; the agent decides the fate of the workers."""

    signum: int


@dataclass(frozen=True, slots=True)
class WorkerRuntimeLost:
    """Permanent loss of the worker runtime; last event."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkersSucceeded:
    """Success of all workers of a node's command; the rest of the command runs."""

    round: int


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """Log files cannot be written (disk full, no permission). Sent once; training continues."""

    message: str


WorkerRuntimeEvent: TypeAlias = (
    Hello
    | Prepared
    | StoreServed
    | Started
    | StartRefused
    | WorkerExited
    | Stopped
    | WorkersStuck
    | WorkersSucceeded
    | LauncherSignalled
    | WorkerRuntimeLost
    | LogTrouble
)


class WorkerRuntime(Protocol):
    """Worker runtime: starts, signals and stops workers.

    Methods raise `WorkerRuntimeError` if the runtime cannot take the command.
    """

    def set_deadline(self, live_until: Callable[[], float | None]) -> None:
        """Kill the workers once `live_until` (monotonic clock) has passed; None means no deadline.

        The runtime enforces the last deadline itself if this process hangs or is gone.
        """
        ...

    def renew(self) -> None:
        """Read the deadline of `set_deadline` again now: it may have become later."""
        ...

    async def node_workers(self) -> int | None:
        """Wait until the number of this node's workers is known; None for the configured number.

        Called once, before `events`. Raises `WorkerRuntimeError` if the runtime ends before.
        """
        ...

    def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        """Yield all events, `Hello` first.

        Iterate once, in one task and without a timeout: a cancelled wait ends the events and the
        connection.
        """
        ...

    async def prepare(self, command: PrepareWorkers) -> None:
        """Preload the modules of the workers; `Prepared` follows. Requires `Hello.warms`."""
        ...

    async def start(self, command: StartWorkers) -> None:
        """Start the round's workers, each in a process group of its own; `Started` follows."""
        ...

    async def stop(
        self,
        round: int,
        grace_seconds: float,
        dump: bool = False,
        *,
        copies: bool = True,
        ends_step: bool = False,
    ) -> None:
        """End the round's process groups; `Stopped` or `WorkersStuck` always follows, also if
        nothing runs.

        Grace 0 sends SIGKILL at once, else SIGTERM and then SIGKILL after the grace period. A
        repeated call can shorten the grace period but never extend it. With `dump`, workers that
        support it write the stacks of their threads to standard error and end.
        With `copies` those that support it first copy the training state of their last step to the
        memory of the node, for at most ten seconds, and half of a grace period. With `ends_step`
        they first finish their step, within that time, also without `copies`, so that the workers
        of other nodes can finish theirs.
        """
        ...

    async def signal(self, round: int, signum: int) -> None:
        """Send a signal to the round's process groups, if it runs.

        `Hello.save_signal` goes only to processes that catch it.
        """
        ...

    async def release(self, exit_code: int, message: str) -> None:
        """Deliver the job's outcome: the launcher kills all processes and exits with this code."""
        ...

    async def aclose(self) -> None:
        """Close. Workers below the agent's own process are killed; a launcher's keep running."""
        ...
