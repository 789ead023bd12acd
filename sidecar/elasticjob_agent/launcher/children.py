"""Process information from the kernel: groups, orphans, and the end of another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The same number on every architecture; os.pidfd_open requires Python 3.9.
SYS_PIDFD_OPEN = 434


class Stat(NamedTuple):
    """Fields of /proc/<pid>/stat used here."""

    pid: int
    state: str
    parent: int
    group: int


def processes() -> Iterator[Stat]:
    """Yield every visible process; processes that end in the meantime are skipped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                yield _parsed((entry / "stat").read_bytes())


def _parsed(stat: bytes) -> Stat:
    # The name, in parentheses, may contain spaces and parentheses.
    head, _, tail = stat.rpartition(b")")
    state, parent, group = tail.split()[:3]
    return Stat(int(head.split()[0]), state.decode("ascii"), int(parent), int(group))


def group_exists(group: int) -> bool:
    """Return True if the process group has a member, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def group_has_only_zombies(group: int) -> bool:
    return all(stat.state in "ZX" for stat in processes() if stat.group == group)


def members(group: int) -> list[int]:
    return [stat.pid for stat in processes() if stat.group == group]


def family(pid: int) -> dict[int, str]:
    """Return the start times, by pid, of a process's descendants and other session members."""
    every = list(processes())
    found, size = {pid}, 0
    while size < len(found):
        size = len(found)
        found |= {stat.pid for stat in every if stat.parent in found}
    for stat in every:
        with contextlib.suppress(OSError):
            if os.getsid(stat.pid) == pid:
                found.add(stat.pid)
    return {each: _began(each) for each in found - {pid}}


def end_if_still(pid: int, began: str) -> None:
    """Send SIGKILL to a process unless its pid has been reused."""
    if began and _began(pid) == began:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _began(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def kill_descendants(within_seconds: float) -> None:
    """Kill and reap all processes left below this subreaper, such as daemons of a worker.

    This process adopts the children of each killed process, so a few iterations reach all.
    """
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        own = os.getpid()
        left = [stat.pid for stat in processes() if stat.parent == own]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if unsupported.

    Raises ProcessLookupError if the process has already ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(SYS_PIDFD_OPEN, pid, 0))
    if fd >= 0:
        return fd
    with contextlib.suppress(PermissionError):
        os.kill(pid, 0)
    return None


def catches(pid: int, signum: int) -> bool:
    """Return True if a process has its own handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(mask & 1 << (signum - 1))


def signal_if_caught(pid: int, signum: int) -> bool:
    """Send a signal if the process has a handler for it; return True if it has."""
    if not catches(pid, signum):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
    return True
