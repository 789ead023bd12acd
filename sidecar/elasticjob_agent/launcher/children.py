"""What the kernel knows about processes: groups, orphans, and the end of another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The same number on every architecture; os.pidfd_open came only with Python 3.9.
SYS_PIDFD_OPEN = 434


class Stat(NamedTuple):
    """The fields of /proc/<pid>/stat that matter here."""

    pid: int
    state: str
    parent: int
    group: int


def processes() -> Iterator[Stat]:
    """Every process that can be seen; those that end meanwhile are left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                yield _parsed((entry / "stat").read_bytes())


def _parsed(stat: bytes) -> Stat:
    # The name, in parentheses, may itself hold spaces and parentheses.
    head, _, tail = stat.rpartition(b")")
    state, parent, group = tail.split()[:3]
    return Stat(int(head.split()[0]), state.decode("ascii"), int(parent), int(group))


def group_exists(group: int) -> bool:
    """Whether the process group has a member, a zombie included."""
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
    """The processes below this one and of its session, itself left out, and when each began."""
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
    """SIGKILL that process, unless its number is another's by now."""
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
    """SIGKILL and reap whatever is left below this subreaper, such as daemons of a worker.

    Each death hands its children to this process, so a few turns reach everything.
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
    """A descriptor that becomes readable when the process ends; None where there is none.

    Raises ProcessLookupError when it has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(SYS_PIDFD_OPEN, pid, 0))
    if fd >= 0:
        return fd
    with contextlib.suppress(PermissionError):
        os.kill(pid, 0)
    return None


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(mask & 1 << (signum - 1))


def signal_if_caught(pid: int, signum: int) -> bool:
    """Whether the process has a handler for it; then it was sent."""
    if not catches(pid, signum):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
    return True
