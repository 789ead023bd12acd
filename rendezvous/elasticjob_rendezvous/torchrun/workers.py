"""Termination of workers that torch's agent would stop too slowly.

torch's agent sends its workers SIGTERM and waits 30 s, for every reason. The rendezvous grants a
shorter grace period, and none after a loss; then it forms the next round without this node.
Workers that survived would run alongside that round, so the remaining ones are killed at the end
of the grace period.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

_RUN_ID = b"TORCHELASTIC_RUN_ID="


class WorkerKiller:
    """Killer of the workers of one run that are children of this process.

    It identifies workers by their environment, and so finds only workers that are commands, which
    torch's agent starts in separate sessions. It ignores workers that are Python functions.
    """

    def __init__(self, run_id: str) -> None:
        self._mark = _RUN_ID + os.fsencode(run_id)
        self._timer: threading.Timer | None = None

    def within(self, grace_seconds: float) -> None:
        """Kill the remaining workers after the grace period, or at once if it is zero."""
        if self._timer is not None:
            return
        self._timer = threading.Timer(grace_seconds, self._kill)
        self._timer.daemon = True
        if grace_seconds > 0:
            self._timer.start()
        else:
            self._kill()

    def call_off(self) -> None:
        """Cancel the kill: the workers are gone or have been replaced."""
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
    """Return the pids of this process's children, started by any of its threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found
