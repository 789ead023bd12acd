"""Processes stuck in the kernel, which SIGKILL does not end, and kills that leave them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Callable, Collection, Sequence

from elasticjob_launcher.processes.process_info import (
    PROC,
    descendants,
    has_signal,
    kill_unless_reused,
    processes,
    reap_children,
    state_and_flags,
)

STUCK_END_SECONDS = 1.0
"""Maximum wait of an ending launcher for killed processes that are stuck in the kernel."""
PF_EXITING = 0x4
"""Flag in /proc/<pid>/stat of a thread that has begun to exit."""
UNINTERRUPTIBLE = "DI"
"""States of a thread that no signal wakes; `I` while its process writes a core file."""
MAX_INTERVAL_SECONDS = 1.0
"""Maximum time that counts between two observations: the launcher may have been suspended."""
STUCK_SECONDS = 10.0
"""Time after which killed processes that are stuck in the kernel are given up."""


class StuckWatch:
    """Stopwatch for killed processes that are stuck in the kernel (see `is_stuck_in_kernel`).

    Between two observations at most `MAX_INTERVAL_SECONDS` count: a launcher that was suspended, or
    had no processor, knows nothing of that time, and under load many processes wait for a moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, proc: Path = PROC) -> None:
        self._clock = clock
        self._proc = proc
        self._seconds = 0.0
        self._last: float | None = None

    def observe(self, pids: Collection[int]) -> float:
        """Return the seconds for which all of these processes have been observed to be stuck."""
        now = self._clock()
        if not pids or not all(is_stuck_in_kernel(pid, self._proc) for pid in pids):
            self._seconds, self._last = 0.0, None
            return 0.0
        if self._last is not None:
            self._seconds += min(now - self._last, MAX_INTERVAL_SECONDS)
        self._last = now
        return self._seconds

    def find_stuck(self, pids: Collection[int]) -> str:
        """Observe the processes; return a text about them if they are to be given up, or empty."""
        if self.observe(pids) < STUCK_SECONDS:
            return ""
        return stuck_text(list(pids), STUCK_SECONDS, self._proc)


def kill_descendants(within_seconds: float) -> None:
    """Kill and reap all processes left below this subreaper, such as daemons of a worker.

    This process adopts the children of each killed process, so a few iterations reach all. It waits
    up to `STUCK_END_SECONDS` if all remaining processes are stuck in the kernel.
    """
    deadline = time.monotonic() + within_seconds
    watch = StuckWatch()
    while time.monotonic() < deadline:
        for _ in reap_children():
            pass
        own = os.getpid()
        left = [stat.pid for stat in processes() if stat.parent == own]
        if not left:
            return
        if watch.observe(left) > STUCK_END_SECONDS:
            for pid, began in descendants(own).items():  # children of those that have not ended
                kill_unless_reused(pid, began)
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def is_stuck_in_kernel(pid: int, proc: Path = PROC) -> bool:
    """Return True if a process is gone, or stuck in the kernel and never runs its program again.

    Each thread has exited, or is in an uninterruptible wait and exits or has SIGKILL pending: at
    the end of the wait the kernel ends it before it returns from its system call. The process may
    exist as long as, for example, a disk does not answer.
    """
    try:
        threads = list((proc / str(pid) / "task").iterdir())
        return all(_cannot_return(thread) for thread in threads)
    except FileNotFoundError:  # reaped in the meantime
        return not (proc / str(pid)).exists()
    except (OSError, ValueError, IndexError):
        return False


def _cannot_return(thread: Path) -> bool:
    state, flags = state_and_flags(thread)
    if state in "ZX":
        return True
    if state not in UNINTERRUPTIBLE:
        return False  # also in an exit: it makes progress
    if flags & PF_EXITING:
        return True
    status = (thread / "status").read_text("utf-8", "replace")
    # The kernel marks each thread (SigPnd) and the process (ShdPnd).
    return any(has_signal(status, name, signal.SIGKILL) for name in ("SigPnd:", "ShdPnd:"))


def kernel_wait(pid: int, proc: Path = PROC) -> str:
    """Return the kernel function in which a thread of a process waits uninterruptibly; empty if
    unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in sorted((proc / str(pid) / "task").iterdir()):
            if state_and_flags(thread)[0] in UNINTERRUPTIBLE:
                found = (thread / "wchan").read_text("utf-8", "replace").strip()
                if found not in ("", "0"):
                    return found
    return ""


def stuck_text(pids: Sequence[int], seconds: float, proc: Path = PROC) -> str:
    """Return a description of processes that have not ended since their SIGKILL."""
    places = {pid: kernel_wait(pid, proc) for pid in sorted(pids)}
    first = next((pid for pid, place in places.items() if place), min(pids))
    more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
    place = places[first]
    return (
        f"process {first}{more} of the workers did not end within {seconds:g} s after SIGKILL: "
        f"it is in an uninterruptible wait in the kernel{f' ({place})' if place else ''}, "
        "as for a disk that does not answer"
    )
