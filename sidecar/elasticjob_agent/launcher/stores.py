"""Store processes: torch stores through which workers find each other, independent of rank 0.

If rank 0 serves the store itself, as in torch, peers that connect slightly too early wait for up
to a second, and the store ends with rank 0. A fork of the zygote serves it instead, at a free port
and ahead of time: the agent offers that port for the next round in which this node is first. This
module owns those processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from .loop import Loop, Timer
from .standby import Standby

SERVE_SECONDS = 5.0
END_SECONDS = 2.0
MASTER_PORT = "MASTER_PORT"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Stores:
    """Keeper of one spare store while the zygote can fork; `on_spare` gets its port, or 0."""

    def __init__(self, loop: Loop, standby: Standby, on_spare: Callable[[int], None]) -> None:
        self._loop = loop
        self._standby = standby
        self._on_spare = on_spare
        self._told: int | None = None  # descriptor for the answer of a store being started
        self._timer: Timer | None = None
        self._spare_pid = 0
        self.spare_port = 0
        self._used_pid = 0
        self._then: Callable[[], None] = lambda: None
        standby.on_able = self.refill

    def refill(self, then: Callable[[], None] = lambda: None) -> None:
        """Start a spare store if possible; call back once it is ready or will not come."""
        possible = not (self._spare_pid or self._told is not None or self._standby.reason)
        told = self._standby.serve() if possible else None
        if told is None:
            then()
            return
        self._told, self._then = told, then
        self._loop.watch(told, self._heard)
        self._timer = self._loop.call_later(SERVE_SECONDS, self._heard)

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

    def _heard(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        told, self._told = self._told, None
        if told is None:
            return
        self._loop.unwatch(told)
        os.set_blocking(told, False)
        text = ""
        with contextlib.suppress(BlockingIOError):
            text = os.read(told, 4096).decode("utf-8", "replace")
        os.close(told)
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
