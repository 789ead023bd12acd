"""Processes of a benchmark: they end with it, and are found by a mark in their environment."""

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
    """Let the kernel kill this child when its parent ends for any reason; call in a new child."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return True if a process runs; an unreaped zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def marked(variable: str, value: str) -> list[int]:
    """Return the processes with the mark in their environment, which descendants inherit.

    Also finds workers in their own sessions and orphans with another parent.
    """
    mark = f"{variable}={value}".encode()
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and mark in environment(pid)]


def environment(pid: int) -> list[bytes]:
    """Return the variables a process was started with, as `NAME=value`."""
    return _words(pid, "environ")


def command(pid: int) -> list[bytes]:
    """Return the command line of a process."""
    return _words(pid, "cmdline")


def _words(pid: int, file: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def end_marked(variable: str, value: str, seconds: float) -> None:
    """Kill all processes with this mark, including newly started ones, until none is alive.

    Raises RuntimeError if some survive that time.
    """
    deadline = time.monotonic() + seconds
    while pids := [pid for pid in marked(variable, value) if alive(pid)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of {value} survived SIGKILL")
        for pid in pids:
            kill(pid)
        time.sleep(POLL_SECONDS)


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.rpartition(")")[2].split()[1])


def below(pid: int) -> set[int]:
    """Return the descendants of a process, except those adopted by others."""
    found: set[int] = set()
    for folder in Path(f"/proc/{pid}/task").iterdir():
        for child in (folder / "children").read_text().split():
            found |= {int(child), *below(int(child))}
    return found


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; ignore a process that has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
