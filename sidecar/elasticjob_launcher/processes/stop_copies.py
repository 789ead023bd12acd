"""Stop copies: snapshots of the last step that workers write before they are stopped.

A worker with `elasticjob.train.Snapshots` listens on a socket in the launcher's folder of
snapshots. The launcher connects and requests a copy of the last step's state to that folder. The
worker answers with the maximum duration, and closes the connection once the copy is complete; if it
has nothing to copy, it closes it at once. Before a planned stop it may finish its step first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.process_info import has_handler

SOCKET = "asked-"
"""Prefix of a worker's socket, before its local rank."""
ANSWER = struct.Struct("<4sI")
"""Answer of a worker: `MAGIC`, and the maximum duration of its copy in milliseconds."""
REQUEST = struct.Struct("<4sBI")
"""Request: `MAGIC`, kind, and the maximum wait in milliseconds."""
MAGIC = b"EJSC"
AT_ONCE, COPY_AFTER_STEP, END_STEP = range(3)
"""Kinds of requests: copy at once; finish the step, then copy; only finish the step."""
ANSWER_SECONDS = 2.0
"""Maximum wait for the answer."""
COPY_SECONDS = 10.0
"""Maximum wait for a copy, even if the worker announces a longer one."""


class StopCopies:
    """Stop copies of a node's workers, for one stop.

    Args:
        folder: folder of snapshots; empty for none.
        local_ranks: workers to send the request to.
        done: called once no worker is copying any more; neither during this call nor after `close`.
        limit: maximum wait in seconds, at most `COPY_SECONDS`.
        kind: kind of the request. With `END_STEP` there is no wait if a listening process, which
            may run below a shell or another wrapper, has a handler of SIGTERM.
    """

    def __init__(
        self,
        loop: Loop,
        folder: str,
        local_ranks: Iterable[int],
        done: Callable[[], object],
        limit: float = COPY_SECONDS,
        kind: int = AT_ONCE,
    ) -> None:
        self.kind = kind
        self._loop = loop
        self._done = done
        limit = min(limit, COPY_SECONDS)
        self._deadline = time.monotonic() + limit
        self._links: dict[int, socket.socket] = {}
        self._timers: dict[int, Timer] = {}
        self._answered: set[int] = set()
        self.handles_sigterm = False
        """True if a process that listens for a worker has a handler of SIGTERM."""
        for rank in local_ranks if folder else ():
            self._ask(folder, rank, limit)
        if kind != END_STEP:
            self.handles_sigterm = any(map(_handles_sigterm, self._links.values()))
        elif self.handles_sigterm:
            self.close()

    def _ask(self, folder: str, rank: int, limit: float) -> None:
        """Connect and send the request at once: a worker that gets none in time copies."""
        link = _connected(folder, rank)
        if link is None:
            return
        if self.kind == END_STEP:
            self.handles_sigterm = self.handles_sigterm or _handles_sigterm(link)
        skips = self.kind == END_STEP and self.handles_sigterm
        request = REQUEST.pack(MAGIC, self.kind, 0 if skips else int(limit * 1000))
        if _sent(link, request) and not skips:
            self._links[rank] = link
            self._loop.watch(link.fileno(), partial(self._received, rank))
            self._end_after(rank, ANSWER_SECONDS)
        else:
            link.close()

    @property
    def pending(self) -> bool:
        """True while a worker may be copying."""
        return bool(self._links)

    def shorten(self, limit: float) -> None:
        """Wait at most `limit` seconds from now."""
        self._deadline = min(self._deadline, time.monotonic() + limit)
        for rank, timer in list(self._timers.items()):
            if timer.due > self._deadline:
                timer.cancel()
                self._end_after(rank, limit)

    def ended(self, local_rank: int) -> None:
        """End the wait for this worker."""
        if local_rank in self._links:
            self._drop(local_rank)
            if not self._links:
                self._done()

    def close(self) -> None:
        """End the wait for all workers."""
        for rank in list(self._links):
            self._drop(rank)

    def _received(self, rank: int) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        try:
            data = link.recv(ANSWER.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        limit = 0.0
        if rank not in self._answered and len(data) == ANSWER.size:
            magic, milliseconds = ANSWER.unpack(data)
            limit = milliseconds / 1000 if magic == MAGIC else 0.0
        if not limit:
            self.ended(rank)
            return
        self._answered.add(rank)
        self._timers[rank].cancel()
        self._end_after(rank, limit)

    def _end_after(self, rank: int, seconds: float) -> None:
        left = min(seconds, self._deadline - time.monotonic())
        self._timers[rank] = self._loop.call_later(max(0.0, left), partial(self.ended, rank))

    def _drop(self, rank: int) -> None:
        self._timers.pop(rank).cancel()
        link = self._links.pop(rank)
        self._loop.unwatch(link.fileno())
        link.close()


_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of Linux: pid, user and group of the process that listens."""


def _handles_sigterm(link: socket.socket) -> bool:
    try:
        found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return has_handler(_CREDENTIALS.unpack(found)[0], signal.SIGTERM)


def _sent(link: socket.socket, request: bytes) -> bool:
    try:
        link.sendall(request)  # fits the buffer of a new connection
    except OSError:
        return False
    return True


def _connected(folder: str, local_rank: int) -> socket.socket | None:
    """Return a connection to a worker; None if it does not listen, or no descriptor is left.

    The path goes through a descriptor of the folder: the length of a socket's path is limited.
    """
    try:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # such as too many open files
        return None
    try:
        link.setblocking(False)
        with _opened(folder) as held:
            link.connect(f"/proc/self/fd/{held}/{SOCKET}{local_rank}")
    except (OSError, ValueError):
        link.close()
        return None
    return link


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield held
    finally:
        os.close(held)
