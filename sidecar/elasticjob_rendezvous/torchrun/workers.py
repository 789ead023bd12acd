"""Ends workers in time where torch's agent would wait longer for them.

torch's agent gives its workers SIGTERM and 30 s, whatever made it stop them. The rendezvous gives
less, and nothing at all after a loss; then it forms the next round without this node. Workers that
ran on would run beside that round. So what is left of them at the end of the grace is killed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

_RUN_ID = b"TORCHELASTIC_RUN_ID="


class WorkerKiller:
    """Kills the workers of one run that are children of this process.

    They are known by their environment, so only commands are found, which torch's agent starts
    in sessions of their own; workers that are Python functions are left to it.
    """

    def __init__(self, run_id: str) -> None:
        self._mark = _RUN_ID + os.fsencode(run_id)
        self._timer: threading.Timer | None = None

    def within(self, grace_seconds: float) -> None:
        """Kill at the end of the grace what is still there; with none, at once."""
        if self._timer is not None:
            return
        self._timer = threading.Timer(grace_seconds, self._kill)
        self._timer.daemon = True
        if grace_seconds > 0:
            self._timer.start()
        else:
            self._kill()

    def call_off(self) -> None:
        """The workers are gone, or others take their place."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _kill(self) -> None:
        for pid in _children():
            if self._is_worker(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _is_worker(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            return self._mark in environment.split(b"\0") and os.getpgid(pid) == pid
        except OSError:
            return False


def _children() -> list[int]:
    """The children of this process, whichever of its threads started them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found
