"""Process information from the kernel: groups, orphans, signal handlers; kills of groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path
from typing import Callable, Collection, Iterator, NamedTuple

from elasticjob_launcher.loop import Loop

# The same number on every architecture; os.pidfd_open requires Python 3.9.
SYS_PIDFD_OPEN = 434
CHECK_SECONDS = 1.0
PROC = Path("/proc")
_TRACKER = re.compile(rb"\x00-c\x00from [\w.]+\.resource_tracker import main;")


class Stat(NamedTuple):
    """Fields of /proc/<pid>/stat used here."""

    pid: int
    state: str
    parent: int
    group: int
    threads: int


def processes() -> Iterator[Stat]:
    """Yield every visible process; processes that end in the meantime are skipped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                yield _parse_stat((entry / "stat").read_bytes())


def _parse_stat(stat: bytes) -> Stat:
    # The name, in parentheses, may contain spaces and parentheses.
    head, _, tail = stat.rpartition(b")")
    fields = tail.split()
    numbers = [int(fields[number]) for number in (1, 2, 17)]
    return Stat(int(head.split()[0]), fields[0].decode("ascii"), *numbers)


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
    """Return True if every thread of every process of the group has ended.

    A process whose first thread has ended is shown as a zombie while others run or wait.
    """
    return all(_is_zombie(stat) for stat in processes() if stat.group == group)


def _is_zombie(stat: Stat) -> bool:
    return stat.state in "ZX" and _has_ended(stat.pid)


def members(group: int) -> list[int]:
    return [stat.pid for stat in processes() if stat.group == group]


def descendants(pid: int) -> dict[int, str]:
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
    return {each: _start_time(each) for each in found - {pid}}


def kill_unless_reused(pid: int, began: str) -> None:
    """Send SIGKILL to a process unless its pid has been reused."""
    if began and _start_time(pid) == began:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    try:
        return stat_fields(PROC / str(pid))[19]
    except OSError:
        return ""


def kill_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def kill_sparing_trackers(groups: Collection[int]) -> frozenset[int]:
    """Kill the processes of groups except resource trackers; return the pids of the trackers.

    A tracker of multiprocessing removes the shared memory and semaphores of killed processes, then
    ends. Reading the processes takes long under load. Therefore the group leaders are killed and
    the groups stopped before it, so that no process runs, or starts another one, meanwhile.
    """
    for group in groups:
        _kill_leader(group)
    for group in groups:
        kill_group(group, signal.SIGSTOP)
    trackers: dict[int, int] = {}
    with contextlib.suppress(OSError):  # no file descriptor is left: then none is spared
        found = [stat for stat in processes() if stat.group in groups]
        trackers = {stat.pid: stat.group for stat in found if _is_tracker(stat)}
        _kill([stat.pid for stat in found if stat.pid not in trackers])
    spared = set(trackers.values())
    for group in groups:
        kill_group(group, signal.SIGCONT if group in spared else signal.SIGKILL)
    return frozenset(trackers)


def kill_except(groups: Collection[int], trackers: Collection[int]) -> bool:
    """Kill the processes of groups except `trackers`; return True if any has not ended."""
    found = [stat for stat in processes() if stat.group in groups and stat.pid not in trackers]
    left = [stat.pid for stat in found if not _is_zombie(stat)]
    _kill(left)
    return bool(left)


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _kill_leader(group: int) -> None:
    # The number of an empty group may have been reused by a process of another group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(group) == group:
            os.kill(group, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Return True for a resource tracker of multiprocessing, or of loky, which joblib uses."""
    try:
        return _is_tracker(_parse_stat((PROC / str(pid) / "stat").read_bytes()))
    except (OSError, ValueError, IndexError):
        return False


def _is_tracker(stat: Stat) -> bool:
    """Return True for a resource tracker that is not the leader of its group.

    The command line is read only if the process has one thread, which runs, is stopped or waits
    interruptibly. For other processes the read may block in the kernel, on the same lock as they.
    """
    if stat.pid == stat.group or stat.threads != 1 or stat.state not in "RST":
        return False
    try:
        return _TRACKER.search((PROC / str(stat.pid) / "cmdline").read_bytes()) is not None
    except OSError:
        return False


def reap_children() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, also orphans adopted by this subreaper; yield the pid and
    wait status of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


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


def follow_process(loop: Loop, pid: int, ended: Callable[[], object]) -> None:
    """Call `ended` once the process has ended for any reason; pid 0 means no process."""
    if not pid:
        return
    try:
        fd = open_pidfd(pid)
    except ProcessLookupError:
        ended()
        return
    if fd is not None:
        loop.watch(fd, ended)
    else:  # a kernel before 5.3
        loop.call_later(CHECK_SECONDS, lambda: follow_process(loop, pid, ended))


def has_signal(status: str, name: str, signum: int) -> bool:
    """Return True if a signal is in a mask of a status file of /proc."""
    mask = int(status.partition(name)[2].split()[0], 16)
    return bool(mask & 1 << (signum - 1))


def _has_ended(pid: int) -> bool:
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
        return all(state_and_flags(thread)[0] in "ZX" for thread in threads)
    except (FileNotFoundError, ProcessLookupError):  # reaped in the meantime
        return True
    except (OSError, ValueError, IndexError):
        return False


def state_and_flags(thread: Path) -> tuple[str, int]:
    fields = stat_fields(thread)
    return fields[0], int(fields[6])


def stat_fields(entry: Path) -> list[str]:
    """Return the fields of a process or thread of /proc, from its state on, the third, in order."""
    return (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def has_handler(pid: int, signum: int, proc: Path = PROC) -> bool:
    """Return True if a process has its own handler for a signal; False if that is unknown."""
    try:
        status = (proc / str(pid) / "status").read_text("utf-8", "replace")
        return has_signal(status, "SigCgt:", signum)
    except (OSError, ValueError, IndexError):  # some sandboxes list no masks
        return False


def signal_if_caught(pid: int, signum: int) -> bool:
    """Send a signal if the process has a handler for it; return True if it has."""
    if not has_handler(pid, signum):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
    return True
