"""Requests to the zygote for forked workers: one message each, answered with the worker's pid."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from elasticjob_launcher.zygote.command import Program

    Pass = Callable[[dict[str, Any], Sequence[int]], None]

FORK_SECONDS = 5.0


class ForkedWorker:
    """Worker forked by the zygote; this launcher is its parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class ForkRequest(NamedTuple):
    """Environment and streams for one worker; the caller keeps ownership of the descriptors."""

    env: Mapping[str, str]
    stdout_fd: int
    stderr_fd: int


def request_forks(
    pass_on: Pass, program: Program, requests: Sequence[ForkRequest]
) -> list[ForkedWorker | str]:
    """Return a worker, or the reason for its absence, for each request.

    `pass_on` sends the zygote a message with descriptors, and raises OSError on failure.
    """
    deadline = time.monotonic() + FORK_SECONDS
    readers: list[socket.socket] = []
    refusal = ""
    try:
        for request in requests:
            readers.append(_request_fork(pass_on, program, request))
    except OSError as error:
        refusal = f"the standby took no request: {error}"
    # Read even if the zygote is lost by now: workers that it forked before run as our children.
    results: list[ForkedWorker | str] = [receive_worker(reader, deadline) for reader in readers]
    results += [refusal] * (len(requests) - len(readers))
    for reader in readers:
        reader.close()
    return results


def _request_fork(pass_on: Pass, program: Program, request: ForkRequest) -> socket.socket:
    """Request one worker; return the socket that delivers its pid."""
    reader, writer = socket.socketpair()
    env = {**request.env, **program.env}
    message = {"do": "fork", "env": env, "process": program.process}
    try:
        pass_on(message, [request.stdout_fd, request.stderr_fd, writer.fileno()])
    except OSError:
        reader.close()
        raise
    finally:
        writer.close()
    return reader


def receive_worker(reader: socket.socket, deadline: float) -> ForkedWorker | str:
    """Return the worker at the other end of the socket, or the reason for its absence.

    A late worker must not run beside its replacement: after the socket's shutdown it cannot report
    its pid, and exits. A pid reported before the shutdown is still read.
    """
    left = max(0.0, deadline - time.monotonic())
    late = not select.select([reader], [], [], left)[0]
    if late:
        reader.shutdown(socket.SHUT_RD)
    pid, _, trouble = reader.recv(4096).decode("utf-8", "replace").partition(" ")
    if trouble:
        return trouble
    if pid:
        return ForkedWorker(int(pid))
    late_text = f"the standby did not fork within {FORK_SECONDS:g} s"
    return late_text if late else "the standby could not fork"
