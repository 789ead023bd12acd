"""Start of a process that leads its own session and cannot outlive the launcher."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

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
            f"{found or command} is no program for this machine: give a script a first line such "
            "as `#!/usr/bin/env python3`, or use an image of this architecture",
        )
    if number == errno.E2BIG:
        return LaunchError(126, f"the arguments and environment of {command!r} are too long")
    return LaunchError(126, f"command {command!r} could not be started: {error}")
