"""Start of processes: workers in sessions of their own, their pipes, and init processes.

Outside a container the launcher forks before it starts: each parent becomes an init process,
the last child continues as the launcher. All are subreapers, and each kills every descendant
of the workers when the process above or below it dies. With two init processes, any two of
agent, init processes, launcher and zygote may be killed together without leaving processes
behind. In a container the runtime does this, and the launcher runs alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elasticjob_launcher.processes.process_info import reap_children
from elasticjob_launcher.processes.stuck_processes import kill_descendants
from elasticjob_launcher.snapshot_folder import remove_abandoned

if TYPE_CHECKING:
    from typing import Protocol

    class Spawned(Protocol):
        """Started process; the code that reaps it sets `returncode`."""

        returncode: int | None

        @property
        def pid(self) -> int: ...

    # Command, environment, standard output, standard error; raises LaunchError.
    Spawn = Callable[[Sequence[str], Mapping[str, str], int, int], Spawned]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# Bound once at import: a child between fork and exec must not import or look up anything.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class LaunchError(Exception):
    """Command that cannot be run, with a shell's exit code and a message that names the fix."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message


def become_subreaper() -> None:
    """Become the subreaper of all orphaned descendants, so that this process reaps them."""
    if _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout_fd: int,
    stderr_fd: int,
    keep_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv` with standard input from /dev/null; raise LaunchError on failure.

    Must be called from the launcher's main thread: the kernel sends the parent-death signal when
    the thread that forked ends, not when the process does.
    """
    if not argv or not argv[0]:
        raise LaunchError(127, "no command to run: set `command` of the trainer container")
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=stderr_fd,
            start_new_session=True,
            pass_fds=keep_fds,
            # The launcher's other threads only write files and hold no lock that the child's one
            # prctl call needs.
            preexec_fn=die_with_parent(os.getpid()),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise _explained(argv[0], env, error) from error


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return the function that a child calls first, so that it is killed when `parent` ends."""

    def in_child() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(127)

    return in_child


def _explained(command: str, env: Mapping[str, str], error: Exception) -> LaunchError:
    number = error.errno if isinstance(error, OSError) else None
    path = env.get("PATH", os.defpath)
    found = command if "/" in command else shutil.which(command, mode=os.F_OK, path=path)
    if number in (errno.ENOENT, errno.ENOTDIR):
        if found is not None and os.path.exists(found):  # noqa: PTH110
            return LaunchError(
                127,
                f"{found} cannot be run: the interpreter named in its first line (or its loader) "
                "does not exist; install it in the image or correct the line",
            )
        where = "" if "/" in command else f" on PATH ({path})"
        return LaunchError(
            127,
            f"command {command!r} was not found{where}: install it in the image, or give its "
            "full path as the first item of `command`",
        )
    if number == errno.EACCES:
        return LaunchError(
            126,
            f"{found or command} is not executable: run `chmod +x` on it in the image, or start "
            f"it through its interpreter, as in `python3 {command}`",
        )
    if number == errno.ENOEXEC:
        return LaunchError(
            126,
            f"{found or command} is not a program for this machine: give a script a first line "
            "such as `#!/usr/bin/env python3`, or use an image of this architecture",
        )
    if number == errno.E2BIG:
        return LaunchError(126, f"the arguments and environment of {command!r} are too long")
    return LaunchError(126, f"command {command!r} could not be started: {error}")


class Pipes:
    """Read and write ends, output first; raises LaunchError if pipes cannot be created."""

    def __init__(self) -> None:
        pairs: list[tuple[int, int]] = []
        try:
            pairs.append(os.pipe())
            pairs.append(os.pipe())
        except OSError as error:
            _close_all([fd for pair in pairs for fd in pair])
            raise LaunchError(126, f"no pipes for the worker's output: {error}") from error
        self.read_fds = [pair[0] for pair in pairs]
        self.write_fds = [pair[1] for pair in pairs]

    def close_read(self) -> None:
        _close_all(self.read_fds)

    def close_write(self) -> None:
        _close_all(self.write_fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


INIT_TITLE = b"elasticjob-init"
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
        os.close(_fork_init(above))
        above = this
    return _fork_init(above)


def _fork_init(parent: int) -> int:
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
        _set_title(INIT_TITLE)
        while self._status is None and os.getppid() == self._parent:
            self._wait(PARENT_CHECK_SECONDS)
        if self._status is None:
            self._end_child()
        kill_descendants(SWEEP_SECONDS)
        remove_abandoned()
        return self._status if self._status is not None else signal.SIGKILL

    def _wait(self, seconds: float) -> None:
        info = signal.sigtimedwait(_AWAITED, seconds)
        if info is not None and info.si_signo in _FORWARDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, info.si_signo)
        self._reap()

    def _reap(self) -> None:
        for pid, status in reap_children():
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
