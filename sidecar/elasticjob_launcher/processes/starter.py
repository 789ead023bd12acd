"""Start of a round's processes: workers, forked from the zygote or cold, and their store.

If rank 0 serves torch's store itself, as in torch, peers that connect slightly too early wait
for up to a second, and the store ends with rank 0. A fork of the zygote serves it instead, at
a free port and ahead of time: the agent offers that port for the next round in which this node
is first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.spawn import LaunchError
from elasticjob_launcher.zygote.fork_requests import ForkRequest
from elasticjob_launcher.zygote.manager import ZygoteManager

if TYPE_CHECKING:
    from typing import Union

    from elasticjob_launcher.processes.spawn import Spawn, Spawned

    Result = Union[Spawned, LaunchError]

SERVE_SECONDS = 5.0
END_SECONDS = 2.0
WAITED_SECONDS = 0.5
"""Wait for the zygote from which on a start does not count as warm."""
MASTER_PORT = "MASTER_PORT"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class StoreProcesses:
    """Keeper of one spare store while the zygote can fork; `on_spare` gets its port, or 0."""

    def __init__(self, loop: Loop, zygote: ZygoteManager, on_spare: Callable[[int], None]) -> None:
        self._loop = loop
        self._zygote = zygote
        self._on_spare = on_spare
        self._answer_fd: int | None = None  # descriptor for the answer of a store being started
        self._timer: Timer | None = None
        self._spare_pid = 0
        self.spare_port = 0
        self._used_pid = 0
        self._then: Callable[[], None] = lambda: None

    def refill(self, then: Callable[[], None] = lambda: None) -> None:
        """Start a spare store if possible; call back once it is ready or will not come."""
        possible = not (self._spare_pid or self._answer_fd is not None or self._zygote.reason)
        answer_fd = self._zygote.serve() if possible else None
        if answer_fd is None:
            then()
            return
        self._answer_fd, self._then = answer_fd, then
        self._loop.watch(answer_fd, self._store_answered)
        self._timer = self._loop.call_later(SERVE_SECONDS, self._store_answered)

    def starting(self, envs: Sequence[Mapping[str, str]]) -> None:
        """Prepare the start of workers: end the last round's store and assign or end the spare."""
        self._end(self._used_pid)
        self._used_pid = 0
        env = envs[0] if envs else {}
        if not self._spare_pid or env.get(MASTER_PORT) != str(self.spare_port):
            return
        pid, self._spare_pid, self.spare_port = self._spare_pid, 0, 0
        if env.get(USE_AGENT_STORE) == "True":
            self._used_pid = pid
        else:
            self._end(pid)
            _await_end(pid)  # rank 0 binds the port itself
        self._on_spare(0)

    def reaped(self, pid: int) -> None:
        if pid == self._used_pid:
            self._used_pid = 0
        if pid == self._spare_pid:
            self._spare_pid = self.spare_port = 0
            self._on_spare(0)

    def _store_answered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        answer_fd, self._answer_fd = self._answer_fd, None
        if answer_fd is None:
            return
        self._loop.unwatch(answer_fd)
        os.set_blocking(answer_fd, False)
        text = ""
        with contextlib.suppress(BlockingIOError):
            text = os.read(answer_fd, 4096).decode("utf-8", "replace")
        os.close(answer_fd)
        pid, _, port = text.partition(" ")
        if port.isdigit():
            self._spare_pid, self.spare_port = int(pid), int(port)
            self._on_spare(self.spare_port)
        self._then()

    def _end(self, pid: int) -> None:
        """Kill a store process; the launcher reaps it."""
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _await_end(pid: int) -> None:
    """Wait until a killed child has closed its sockets, without reaping it."""
    deadline = time.monotonic() + END_SECONDS
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)


class ProcessPlan(NamedTuple):
    """Process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout_fd: int = -1
    stderr_fd: int = -1

    def to(self, fds: Sequence[int]) -> ProcessPlan:
        return self._replace(stdout_fd=fds[0], stderr_fd=fds[1])


class StartResult(NamedTuple):
    """Results of the plans, in order; `cold_reason` is empty if all were forked without a wait."""

    processes: list[Result]
    cold_reason: str


class Starter:
    """Starter of worker processes; with `zygote` None, all start cold."""

    def __init__(
        self, spawn: Spawn, zygote: ZygoteManager | None, stores: StoreProcesses | None
    ) -> None:
        self._spawn = spawn
        self._zygote = zygote
        self._stores = stores
        self._waits_since: float | None = None
        self._waits_for = ""

    def when_able(self, plans: Sequence[ProcessPlan], then: Callable[[], None]) -> None:
        """Call back once there is nothing to wait for: at once, unless the zygote is loading.

        The wait costs nothing: the zygote loads modules that the workers would load themselves.
        """
        self._waits_since = None
        if self._zygote is None or self._unsuited(plans):
            then()
        else:
            if not self._zygote.settled:
                self._waits_since, self._waits_for = time.monotonic(), self._zygote.reason
            self._zygote.when_settled(then)

    def start(self, plans: Sequence[ProcessPlan]) -> StartResult:
        if self._stores is None:
            return self._started(plans)
        self._stores.starting([plan.env for plan in plans])
        result = self._started(plans)
        self._stores.refill()
        return result

    def _started(self, plans: Sequence[ProcessPlan]) -> StartResult:
        reason = self._unsuited(plans)
        if self._zygote is None or reason:
            result = StartResult([self._cold(plan) for plan in plans], reason)
            if self._zygote is not None and len({plan.argv for plan in plans}) == 1:
                self._zygote.prepare_for(plans[0].argv, plans[0].env)
            return result
        if self._zygote.reason:
            return StartResult([self._cold(plan) for plan in plans], self._zygote.reason)
        requests = [ForkRequest(plan.env, plan.stdout_fd, plan.stderr_fd) for plan in plans]
        processes: list[Result] = []
        for plan, forked in zip(plans, self._zygote.fork(requests)):
            if isinstance(forked, str):
                reason = reason or forked
                processes.append(self._cold(plan))
            else:
                processes.append(forked)
        return StartResult(processes, reason or self._wait_reason())

    def _wait_reason(self) -> str:
        """Return the reason that forked workers started late; empty if they did not."""
        since = self._waits_since
        waited = 0.0 if since is None else time.monotonic() - since
        if waited < WAITED_SECONDS:
            return ""
        return f"waited {waited:.1f} s: {self._waits_for}"

    def reaped(self, pid: int, status: int) -> None:
        if self._zygote is not None:
            self._zygote.reaped(pid, status)
        if self._stores is not None:
            self._stores.reaped(pid)

    def _cold(self, plan: ProcessPlan) -> Result:
        try:
            return self._spawn(plan.argv, plan.env, plan.stdout_fd, plan.stderr_fd)
        except LaunchError as error:
            return error

    def _unsuited(self, plans: Sequence[ProcessPlan]) -> str:
        """Return the reason against a fork of these workers; empty if there is none."""
        if self._zygote is None or not self._zygote.is_requested:
            return "warm start is off"
        for plan in plans:
            difference = self._zygote.difference(plan.argv, plan.env)
            if difference:
                return difference
        return ""
