"""Processes that a benchmark starts: they end with it, and are found by a mark of their own."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

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
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


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
