"""Processes that a benchmark starts: they end with it, and are found by a mark of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a new child: have the kernel kill it when its parent is gone, however that came about."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has reaped yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def marked(variable: str, value: str) -> list[int]:
    """The processes whose environment holds the mark: all that descend from who was given it.

    Agents put their workers into sessions of their own, and orphans change their parent: neither
    hides them from this.
    """
    mark = f"{variable}={value}".encode()
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and mark in environment(pid)]


def environment(pid: int) -> list[bytes]:
    """The variables that it was started with, as `NAME=value`."""
    return _words(pid, "environ")


def command(pid: int) -> list[bytes]:
    """Its command line."""
    return _words(pid, "cmdline")


def _words(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:  # it ended meanwhile, or belongs to another user
        return []


def end_marked(variable: str, value: str, seconds: float) -> None:
    """Kill all with this mark, and whatever they still start, until none is alive.

    Raises RuntimeError when some live on after that time.
    """
    deadline = time.monotonic() + seconds
    while pids := [pid for pid in marked(variable, value) if alive(pid)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of {value} survived SIGKILL")
        for pid in pids:
            kill(pid)
        time.sleep(POLL_SECONDS)


def parent(pid: int) -> int:
    """Its parent; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.rpartition(")")[2].split()[1])


def below(pid: int) -> set[int]:
    """The processes that descend from this one, but for what was adopted by others."""
    found: set[int] = set()
    for folder in Path(f"/proc/{pid}/task").iterdir():
        for child in (folder / "children").read_text().split():
            found |= {int(child), *below(int(child))}
    return found


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; one that has ended already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
