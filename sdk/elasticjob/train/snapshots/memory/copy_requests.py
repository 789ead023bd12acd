"""Requests of the launcher for a copy at a stop, over a socket in the folder of snapshots."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from elasticjob.train.snapshots.memory.part_files import opened

if TYPE_CHECKING:
    from pathlib import Path

SOCKET = "asked-"
"""Prefix of the socket's name; the local rank follows."""
ANSWER = struct.Struct("<4sI")
"""Answer to the launcher: `MAGIC`, and the maximum duration of the copy in milliseconds."""
MAGIC = b"EJSC"
REQUEST = struct.Struct("<4sBI")
"""Request of the launcher: `MAGIC`, the kind, and the time in milliseconds after which the launcher
stops this worker in any case."""
AT_ONCE, COPY_AFTER_STEP, END_STEP = range(3)
"""Kinds of requests: copy now; copy after the next `save`; only wait for the next `save`."""
REQUEST_SECONDS = 1.0
"""Maximum wait for the request after a connection; without one, copy at once. Older launchers send
none, and wait twice as long for the answer. A newer one may get no processor time in between."""


class Answers(Protocol):
    """Object that answers the launcher's requests."""

    def answer(self, link: socket.socket) -> None: ...


def listen(folder: Path, local_rank: int, owner: Answers) -> weakref.finalize[Any, Any]:
    """Let `owner` answer requests in a thread; call the result to end it. Raises OSError.

    It also ends once `owner` is collected.
    """
    listener = _listener(folder, local_rank)
    threading.Thread(
        target=_answer,
        args=(listener, weakref.ref(owner)),
        name="elasticjob-stop-copy",
        daemon=True,
    ).start()
    ending = weakref.finalize(owner, _end, listener, os.getpid())
    ending.atexit = False
    return ending


def confirm(link: socket.socket, seconds: float) -> None:
    """Answer the launcher that the copy takes at most `seconds`."""
    link.sendall(ANSWER.pack(MAGIC, int(seconds * 1000)))


def requested(link: socket.socket) -> tuple[int, float]:
    """Return the kind of the request, and the time in seconds until the worker is stopped."""
    link.settimeout(REQUEST_SECONDS)
    data = b""
    with contextlib.suppress(OSError):
        data = link.recv(REQUEST.size)
    link.settimeout(None)
    if len(data) == REQUEST.size:
        magic, kind, milliseconds = REQUEST.unpack(data)
        if magic == MAGIC and kind in (COPY_AFTER_STEP, END_STEP):
            return kind, milliseconds / 1000
    return AT_ONCE, 0.0


def _listener(folder: Path, local_rank: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # By its descriptor: the length of a socket's path is limited.
        with opened(folder, os.O_PATH | os.O_DIRECTORY) as held:
            path = f"/proc/self/fd/{held}/{SOCKET}{local_rank}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            listener.bind(path)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def _answer(listener: socket.socket, owner: weakref.ReferenceType[Answers]) -> None:
    """Copy the state of `owner` for each connection, until the socket is closed."""
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        with link, contextlib.suppress(OSError):
            found = owner()
            if found is not None:
                found.answer(link)
            del found


def _end(listener: socket.socket, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
    listener.close()
