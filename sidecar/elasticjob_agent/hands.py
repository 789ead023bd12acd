"""The port through which the agent runs workers: commands it gives, events it gets back.

Two implementations: `local.LocalHands` (below the agent's own process) and `pod.LauncherHands`
(through the launcher in the training container). The agent's core knows only what stands here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


class HandsError(Exception):
    """The hands could not take a command: they are not connected, or no longer."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One worker to start.

    `env` is laid over the hands' own environment. `log_dir` is where `stdout.log` and `stderr.log`
    are written ("" writes none); `prefix`, such as "[0] ", begins every forwarded line. Streams
    (1 is standard output, 2 standard error) named in `unlogged` get no file, in `silent` are not
    forwarded.
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
    """Start the workers of a round; `max_log_bytes` bounds what each log stream keeps on disk."""

    round: int
    workers: tuple[WorkerStart, ...]
    max_log_bytes: int


@dataclass(frozen=True, slots=True)
class PrepareWorkers:
    """Have an interpreter ready from which workers of this command are forked.

    `env` is what is the same for all of them; `modules` are loaded besides those that are found;
    what is learned is kept in the file `memory`, if it is not empty.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    modules: tuple[str, ...] = ()
    memory: str = ""


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker ended: by exit code or by signal, never both.

    A command that could not be started is an exit with code 127 (not found) or 126 (cannot be
    run), pid 0 and a `message` that names the fix. `stderr_tail` is the last of what it wrote to
    standard error, at most 16 KiB, or 64 where it was told to write its stacks. `out_of_memory`
    means that the kernel killed in the workers' cgroup for want of memory before it ended; the
    `message` then says so. `unasked`: the hands had killed the round by themselves, for want of
    an agent.
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
    """The hands are there. Again after each reconnection; it replaces what was known before.

    `running` is the round whose process groups are not empty, if any; `pids` are its workers that
    still run, by local rank; `exits` are all exits of the round started last (running or not), so
    an agent that comes back learns what it missed. `env_names` are the variables that the base
    environment sets. `warms`: it knows `prepare`. `save_signal`: what
    asks workers for a checkpoint, where the user named a signal; 0 for none. `live_until`: the
    deadline that the workers have, on the monotonic clock; None where they have none.
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` asked for is there, or was given up for a reason: then workers start cold."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreServed:
    """A store that workers can meet at is served at this port, for the next round that is started
    with it as its master; 0: there is none, or no more.
    """

    port: int


@dataclass(frozen=True, slots=True)
class Started:
    """The round's workers run. One that could not be started has no pid; its exit follows.

    `warm`: all were forked from the interpreter that was prepared; else `cold_reason` says why not.
    """

    round: int
    pids: Mapping[int, int]
    warm: bool = False
    cold_reason: str = ""


@dataclass(frozen=True, slots=True)
class StartRefused:
    """Nothing was started: another round's processes are still there."""

    round: int
    message: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Every process of that round's process groups is gone and reaped.

    Comes once when the groups become empty, however that happened, and as the answer to every
    `stop` of a round that does not run.
    """

    round: int


@dataclass(frozen=True, slots=True)
class LauncherSignalled:
    """The launcher was told to end (SIGTERM): the agent decides what happens to the workers."""

    signum: int


@dataclass(frozen=True, slots=True)
class HandsGone:
    """The hands are lost and do not come back; nothing follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """Log files cannot be written (disk full, no permission). Said once; training goes on."""

    message: str


HandsEvent: TypeAlias = (
    Hello
    | Prepared
    | StoreServed
    | Started
    | StartRefused
    | WorkerExited
    | Stopped
    | LauncherSignalled
    | HandsGone
    | LogTrouble
)


class Hands(Protocol):
    """Starts, signals and stops workers; its methods raise `HandsError` when it cannot be told."""

    def heed(self, live_until: Callable[[], float | None]) -> None:
        """Let workers live no longer than `live_until` says, on the monotonic clock.

        The hands hold the last deadline by themselves when this process hangs or is gone.
        None is no deadline.
        """
        ...

    def renew(self) -> None:
        """Look now at what `heed` was given: it may have grown."""
        ...

    def events(self) -> AsyncIterator[HandsEvent]:
        """Everything that happens, `Hello` first.

        To be iterated once, by one task and without a timeout: a cancelled wait ends the events
        and the connection.
        """
        ...

    async def prepare(self, command: PrepareWorkers) -> None:
        """Load beforehand what workers will load; `Prepared` follows. Only if `Hello.warms`."""
        ...

    async def start(self, command: StartWorkers) -> None:
        """Start the round's workers, each in a process group of its own; `Started` follows."""
        ...

    async def stop(self, round: int, grace_seconds: float, dump: bool = False) -> None:
        """End the round's process groups; `Stopped` always follows, also if nothing runs.

        Grace 0 is SIGKILL at once, else SIGTERM and SIGKILL after it. May be called again: less
        grace shortens, more never lengthens. With `dump` workers that can do so write the stacks
        of their threads to standard error first, and end by that.
        """
        ...

    async def signal(self, round: int, signum: int) -> None:
        """Send a signal to the round's process groups, if it runs.

        That of `Hello.save_signal` goes only to processes that catch it.
        """
        ...

    async def release(self, exit_code: int, message: str) -> None:
        """The job's outcome: whatever still runs is killed, the launcher exits with this code."""
        ...

    async def aclose(self) -> None:
        """Let go. What runs below the agent's own process is killed; a launcher's is left alone."""
        ...
