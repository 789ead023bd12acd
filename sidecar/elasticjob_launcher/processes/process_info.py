"""Process information from the kernel: groups, orphans, signal handlers, and memory kills.

A worker killed by the kernel for memory ends by SIGKILL like any other; only the counters of
its cgroup distinguish it. In a container the cgroup's files are at the root of the mount,
independent of the path that the kernel reports for the process; outside, they are below that path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import Callable, Collection, Iterator, NamedTuple, Sequence

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


STUCK_END_SECONDS = 1.0
"""Maximum wait of an ending launcher for killed processes that are stuck in the kernel."""


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


PF_EXITING = 0x4
"""Flag in /proc/<pid>/stat of a thread that has begun to exit."""
UNINTERRUPTIBLE = "DI"
"""States of a thread that no signal wakes; `I` while its process writes a core file."""


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
    state, flags = _state_and_flags(thread)
    if state in "ZX":
        return True
    if state not in UNINTERRUPTIBLE:
        return False  # also in an exit: it makes progress
    if flags & PF_EXITING:
        return True
    status = (thread / "status").read_text("utf-8", "replace")
    # The kernel marks each thread (SigPnd) and the process (ShdPnd).
    return any(_has_signal(status, name, signal.SIGKILL) for name in ("SigPnd:", "ShdPnd:"))


def _has_signal(status: str, name: str, signum: int) -> bool:
    """Return True if a signal is in a mask of a status file of /proc."""
    mask = int(status.partition(name)[2].split()[0], 16)
    return bool(mask & 1 << (signum - 1))


def _has_ended(pid: int) -> bool:
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
        return all(_state_and_flags(thread)[0] in "ZX" for thread in threads)
    except (FileNotFoundError, ProcessLookupError):  # reaped in the meantime
        return True
    except (OSError, ValueError, IndexError):
        return False


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


def _state_and_flags(thread: Path) -> tuple[str, int]:
    fields = stat_fields(thread)
    return fields[0], int(fields[6])


def stat_fields(entry: Path) -> list[str]:
    """Return the fields of a process or thread of /proc, from its state on, the third, in order."""
    return (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def kernel_wait(pid: int, proc: Path = PROC) -> str:
    """Return the kernel function in which a thread of a process waits uninterruptibly; empty if
    unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in sorted((proc / str(pid) / "task").iterdir()):
            if _state_and_flags(thread)[0] in UNINTERRUPTIBLE:
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


def has_handler(pid: int, signum: int, proc: Path = PROC) -> bool:
    """Return True if a process has its own handler for a signal; False if that is unknown."""
    try:
        status = (proc / str(pid) / "status").read_text("utf-8", "replace")
        return _has_signal(status, "SigCgt:", signum)
    except (OSError, ValueError, IndexError):  # some sandboxes list no masks
        return False


def signal_if_caught(pid: int, signum: int) -> bool:
    """Send a signal if the process has a handler for it; return True if it has."""
    if not has_handler(pid, signum):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
    return True


CGROUP_MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
UNLIMITED = 1 << 60
"""Threshold for no limit: cgroup version 1 then reports a value slightly below 2**63."""


class _CgroupFiles(NamedTuple):
    events: Path
    limit: Path


class MemoryCgroup:
    """Cgroup that limits the memory of this process and its workers, from its construction on."""

    def __init__(self, mount: Path = CGROUP_MOUNT, own: Path = OWN_CGROUP) -> None:
        self._files = next((f for f in _cgroup_candidates(mount, own) if f.events.is_file()), None)
        self._explained = self.kills()

    def kills(self) -> int | None:
        """Return the number of processes that the kernel has killed for memory; None if unknown.

        The count only grows and includes processes in child cgroups.
        """
        content = _read_file(self._files.events) if self._files else ""
        found = _KILLS.search(content)
        return int(found.group(1)) if found else None

    def explains_exit(self) -> bool:
        """Return True if the kernel has killed a process since; each kill explains one exit."""
        known, kills = self._explained, self.kills()
        if known is None or kills is None or kills <= known:
            return False
        self._explained = known + 1
        return True

    def limit_text(self) -> str:
        """Return the memory limit, such as `512 MiB`; empty if there is none."""
        content = _read_file(self._files.limit).strip() if self._files else ""
        if not (content.isascii() and content.isdigit()) or int(content) >= UNLIMITED:
            return ""
        return f"{int(content) / (1 << 20):.0f} MiB"


def _cgroup_candidates(mount: Path, own: Path) -> Iterator[_CgroupFiles]:
    for line in _read_file(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        places = (path.lstrip("/"), "")
        if not controllers:
            for place in places:
                yield _CgroupFiles(mount / place / "memory.events", mount / place / "memory.max")
        elif "memory" in controllers.split(","):
            for place in places:
                folder = mount / "memory" / place
                yield _CgroupFiles(folder / "memory.oom_control", folder / "memory.limit_in_bytes")


def _read_file(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
