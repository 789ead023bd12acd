"""Forks of a node's workers: each is requested from the zygote and reports its own pid."""

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
    """Worker forked by the zygote; this launcher is its parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class Birth(NamedTuple):
    """Environment and streams for one worker; the caller keeps ownership of the descriptors."""

    env: Mapping[str, str]
    stdout_fd: int
    stderr_fd: int


def fork(pass_on: Pass, program: Program, births: Sequence[Birth]) -> list[Forked | str]:
    """Return a worker, or the reason for its absence, for each birth.

    `pass_on` sends the zygote a message with descriptors, and raises OSError on failure.
    """
    deadline = time.monotonic() + FORK_SECONDS
    heard: list[socket.socket] = []
    refusal = ""
    try:
        for birth in births:
            heard.append(_request(pass_on, program, birth))
    except OSError as error:
        refusal = f"the standby took no request: {error}"
    # Read even if the zygote is lost by now: workers that it forked before run as our children.
    results: list[Forked | str] = [born(told, deadline) for told in heard]
    results += [refusal] * (len(births) - len(heard))
    for told in heard:
        told.close()
    return results


def _request(pass_on: Pass, program: Program, birth: Birth) -> socket.socket:
    """Request one worker; return the socket that delivers its pid."""
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
    """Return the worker at the other end of the socket, or the reason for its absence.

    A late worker must not run beside its replacement: after the socket's shutdown it cannot report
    its pid, and exits. A pid reported before the shutdown is still read.
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
