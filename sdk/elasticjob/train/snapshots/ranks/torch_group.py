"""Process group of the ranks: the channel over which they exchange bytes, and its store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

STORE_SECONDS = 5.0
"""Maximum wait for the store, whose host may be lost."""


class Channel:
    """Group over which the ranks of a process group exchange bytes.

    Args:
        group: the group; None for the process group itself.

    Attributes:
        protocol: protocol of all ranks; 0 until they have agreed on one.
        unfinished: call whose exchange was given up; empty without one. The next exchange would
            receive its records.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.protocol = 0
        self.unfinished = ""


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
"""Channel of each process group. A rank that restores again, while another one saves, uses it too:
they receive each other's calls."""


def present_channel() -> Channel:
    """Return the channel of the present process group. The first call is a collective."""
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    found = _channels.get(world)
    if found is None:
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        found = _channels[world] = Channel(group)
    return found


class Requests:
    """Requests to the store, made one after another by a thread of this process.

    If the host of the store does not answer, a request may not end, and each later one of any
    thread waits for it. The end of the process must not, and cannot start a thread any more.
    """

    def __init__(self) -> None:
        self._pid = 0  # in a fork there is no thread
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]
        self._last = threading.Event()

    def start(self) -> None:
        """Start the thread, once in this process."""
        if self._pid != os.getpid():
            self._pid, self._waiting = os.getpid(), queue.SimpleQueue()
            self._last.set()
            threading.Thread(
                target=self._run, name="elasticjob-snapshot-calls", daemon=True
            ).start()

    @property
    def is_busy(self) -> bool:
        """True while an earlier request has not ended."""
        return not self._last.is_set()

    def make(self, request: Callable[[], None]) -> None:
        """Make a request after those before it; wait for its end at most `STORE_SECONDS`."""
        if self._pid != os.getpid():
            return
        # Without an answer to an earlier request there is none to this one in time.
        seconds = 0.0 if self.is_busy else STORE_SECONDS
        self._last = threading.Event()
        self._waiting.put((request, self._last))
        self._last.wait(seconds)

    def _run(self) -> None:
        while True:
            request, is_made = self._waiting.get()
            # No exchange, and no connection or function of the process group, may be left.
            with contextlib.suppress(Exception):
                request()
            del request  # with the gang, and its group
            is_made.set()


store_requests = Requests()


def default_store() -> dist.Store:
    """Return the store of the process group, which needs no collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def leak(group: dist.ProcessGroup | None) -> None:
    """Keep a group with a collective that does not end: its destructor would wait for it."""
    import torch.distributed as dist

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group or dist.group.WORLD))


def group_size() -> int | None:
    """Return the number of ranks of the process group; None if there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
