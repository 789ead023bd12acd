"""Exclusive access to the places of snapshots: one writer in a process, one per local rank.

Two writers in one place would overwrite each other's state, so the second one is refused before it
writes. The lock of a local rank in the memory of its node ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import os
import weakref
from typing import TYPE_CHECKING

from elasticjob.train.snapshots.memory.buffers import LOCK, open_lock, true_within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

LOCK_SECONDS = 2.0
"""Maximum wait for the lock of a former worker whose process is still ending."""

_writers: dict[str, weakref.ReferenceType[object]] = {}
"""Writer of each place in this process, by its path without symbolic links."""
_locks: dict[str, tuple[int, int]] = {}
"""Open file of each lock, and the process that holds it: a fork inherits the file alone."""


class Claim:
    """Right of one object to write to its places.

    Args:
        owner: the object; its places are free once it is collected.
        places: function that returns the places, by paths without symbolic links.
        memory: that of them in the memory of this node, with a lock; None without one.
        local_rank: local rank of this process.
    """

    def __init__(
        self,
        owner: object,
        places: Callable[[], Iterable[str]],
        memory: Path | None,
        local_rank: int,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._function = places
        self._places: list[str] = []
        self._lock = None if memory is None else os.path.abspath(memory / f"{LOCK}{local_rank}")  # noqa: PTH100
        self._local_rank = local_rank
        self._pid = 0
        self._end: Callable[[], object] | None = None

    def take(self) -> None:
        """Take the places on the first call, and again after `release` or a fork.

        Raises:
            RuntimeError: another object or process writes there; nothing has been written.
        """
        if self._pid == os.getpid():
            return
        self._places = list(self._function())
        if any(self._other(place) for place in self._places):
            gc.collect()  # the other one may be unused, and part of a cycle
        for place in self._places:
            if self._other(place) is not None:
                raise RuntimeError(
                    f"another Snapshots in this process saves to {place}: use one Snapshots, with "
                    "one state for all models, or close the other one before"
                )
        if self._lock is not None:
            self._take_lock(self._lock)
        for place in self._places:
            _writers[place] = self._owner
        self._pid = os.getpid()
        owner = self._owner()
        assert owner is not None
        end = weakref.finalize(owner, _free, self._owner, self._places, self._lock, self._pid)
        end.atexit = False
        self._end = end

    def release(self) -> None:
        """Free the places for others."""
        self._pid = 0
        if self._end is not None:
            self._end()

    def _other(self, place: str) -> object | None:
        writer = _writers.get(place)
        return None if writer is None or writer is self._owner else writer()

    def _take_lock(self, path: str) -> None:
        held = _locks.get(path)
        if held is not None and held[1] == os.getpid():
            return
        try:
            descriptor = open_lock(path)
        except OSError:
            return  # the first snapshot reports memory that cannot be written
        try:
            if not true_within(LOCK_SECONDS, functools.partial(_is_locked, descriptor)):
                raise RuntimeError(
                    f"another process saves snapshots as local rank {self._local_rank} of this "
                    f"node, to {os.path.dirname(path)}: use Snapshots in one process of each "  # noqa: PTH120
                    "rank, or give the second program a job of its own"
                )
        except BaseException:
            os.close(descriptor)
            raise
        _locks[path] = (descriptor, os.getpid())


def _free(
    owner: weakref.ReferenceType[object], places: list[str], lock: str | None, pid: int
) -> None:
    """Free the places of an owner in the process that took them."""
    if pid != os.getpid():
        return
    for place in places:
        if _writers.get(place) is owner:
            del _writers[place]
    if lock in _locks and _locks[lock][1] == pid:
        os.close(_locks.pop(lock)[0])


def _is_locked(descriptor: int) -> bool:
    """Return True unless another process has the lock; also for a file system without locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
