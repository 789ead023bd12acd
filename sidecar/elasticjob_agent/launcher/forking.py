"""The births of a node's workers: each is asked of the standby, and tells its own pid."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .command import Program

    Pass = Callable[[dict[str, Any], Sequence[int]], None]

FORK_SECONDS = 5.0


class Forked:
    """A worker that the standby forked; this launcher is its parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class Birth(NamedTuple):
    """What one worker is to be given; the descriptors stay the caller's."""

    env: Mapping[str, str]
    stdout_fd: int
    stderr_fd: int


def fork(pass_on: Pass, program: Program, births: Sequence[Birth]) -> list[Forked | str]:
    """A worker for each, or the reason why there is none.

    `pass_on` gives the standby a message with descriptors, and raises OSError.
    """
    deadline = time.monotonic() + FORK_SECONDS
    heard: list[socket.socket] = []
    refusal = ""
    try:
        for birth in births:
            heard.append(_request(pass_on, program, birth))
    except OSError as error:
        refusal = f"the standby took no request: {error}"
    # Also when it is lost by now: those that it forked before run, and are ours.
    results: list[Forked | str] = [born(told, deadline) for told in heard]
    results += [refusal] * (len(births) - len(heard))
    for told in heard:
        told.close()
    return results


def _request(pass_on: Pass, program: Program, birth: Birth) -> socket.socket:
    """Ask for one worker; where its pid comes."""
    told, tell = socket.socketpair()
    env = {**birth.env, **program.env}
    message = {"do": "fork", "env": env, "command": program.command}
    try:
        pass_on(message, [birth.stdout_fd, birth.stderr_fd, tell.fileno()])
    except OSError:
        told.close()
        raise
    finally:
        tell.close()
    return told


def born(told: socket.socket, deadline: float) -> Forked | str:
    """The worker that was born at the other end; the reason where none was.

    One for which nobody waits any longer must not run beside the one that takes its place: from
    the moment when the socket is shut it cannot tell its pid, and ends. What it told before that
    is read.
    """
    left = max(0.0, deadline - time.monotonic())
    late = not select.select([told], [], [], left)[0]
    if late:
        told.shutdown(socket.SHUT_RD)
    pid, _, trouble = told.recv(4096).decode("utf-8", "replace").partition(" ")
    if trouble:
        return trouble
    if pid:
        return Forked(int(pid))
    late_text = f"the standby did not fork within {FORK_SECONDS:g} s"
    return late_text if late else "the standby could not fork"
