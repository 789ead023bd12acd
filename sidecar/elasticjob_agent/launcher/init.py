"""Init processes of a launcher that runs outside a container.

The launcher forks before it starts: each parent becomes an init process, the last child continues
as the launcher. All are subreapers, and each kills every descendant of the workers when the
process above or below it dies. With two init processes, any two of agent, init processes, launcher
and zygote may be killed together without leaving processes behind. In a container the runtime does
this, and the launcher runs alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from .children import kill_descendants
from .spawn import PR_SET_PDEATHSIG, become_subreaper

TITLE = b"elasticjob-init"
INIT_PROCESSES = 2
OWN_END_SECONDS = 3.0
"""Time for the launcher to end by itself once its parent is gone."""
SWEEP_SECONDS = 5.0
PARENT_CHECK_SECONDS = 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PARENT_DIED = signal.SIGUSR1
_AWAITED = (*_FORWARDED, _PARENT_DIED, signal.SIGCHLD)


def fork_launcher() -> int:
    """Fork the init processes; return, in the launcher, a descriptor that ends with the last one.

    The parents never return: they exit as the launcher does. Must be called before any thread
    starts.
    """
    above = os.getppid()
    for _ in range(INIT_PROCESSES - 1):
        this = os.getpid()
        os.close(_fork(above))
        above = this
    return _fork(above)


def _fork(parent: int) -> int:
    """Fork one init process and return in its child, with a descriptor that ends with the first.

    `parent` is the process above both.
    """
    ours, theirs = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return ours
    status = 1
    try:
        status = _Init(pid, parent, theirs).run()
    finally:
        _exit_as(status)


class _Init:
    """Init process: waits for the end of its child or of its parent.

    `lifeline` is open while it runs.
    """

    def __init__(self, child: int, parent: int, lifeline: int) -> None:
        self._child = child
        self._parent = parent
        self._lifeline = lifeline
        self._status: int | None = None

    def run(self) -> int:
        """Return the launcher's wait status, with no descendant left."""
        become_subreaper()
        # Delivered when the thread that started this process ends, not necessarily the parent
        # process: the parent pid is therefore compared each time.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, _PARENT_DIED, 0, 0, 0)
        _keep_only(self._lifeline)
        _set_title(TITLE)
        while self._status is None and os.getppid() == self._parent:
            self._wait(PARENT_CHECK_SECONDS)
        if self._status is None:
            self._end_child()
        kill_descendants(SWEEP_SECONDS)
        return self._status if self._status is not None else signal.SIGKILL

    def _wait(self, seconds: float) -> None:
        info = signal.sigtimedwait(_AWAITED, seconds)
        if info is not None and info.si_signo in _FORWARDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, info.si_signo)
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status

    def _end_child(self) -> None:
        """Let the launcher kill the workers and write its logs, then kill it."""
        os.close(self._lifeline)
        deadline = time.monotonic() + OWN_END_SECONDS
        while self._status is None and (left := deadline - time.monotonic()) > 0:
            self._wait(left)


def _keep_only(kept: int) -> None:
    """Close every other descriptor, so that the agent sees the end of shared connections."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor, already closed
                os.close(fd)


def _set_title(title: bytes) -> None:
    """Replace the command line that `ps` shows, which is the launcher's."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if end - start > len(title) > 0 < start:
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _exit_as(status: int) -> NoReturn:
    """Exit with the launcher's exit code, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        with contextlib.suppress(OSError):
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
