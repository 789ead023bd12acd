"""Record of the last step of each worker, in the node's memory, for the next round.

The file `reached-N` has the last step of local rank N, its next regular snapshot, the reason for
which that step would be lost, the newest snapshot in storage, and the rate of the faults. It
outlives the worker, so that the next round knows the lost steps, and whether the snapshots in
memory are older than those in storage.
"""

from __future__ import annotations

import binascii
import contextlib
import math
import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob import layout
from elasticjob.train.snapshots.core.interval import Losses

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_REACHED = struct.Struct("<qQqQqq")
_CHECK = struct.Struct("<I")
_BYTES = _REACHED.size + _CHECK.size
_LAST = struct.Struct("<qB")
"""Fields after the checksum, absent in files of earlier versions. A partial write is harmless."""
_LOSS_AT = _BYTES + _LAST.size - 1
_LOSSES = struct.Struct("<ddd?")
"""Last fields, absent in files of earlier versions: `Losses`, and True once a restore has counted
the steps that the previous round lost."""
_LOSSES_AT = _BYTES + _LAST.size
_FILE_BYTES = _LOSSES_AT + _LOSSES.size
_MOST = 1e12
"""Maximum plausible value of these fields: a partially written record may have any."""
_NEVER = layout.NO_STEP
_MODE = 0o600


class Reached(NamedTuple):
    """Last step of a worker, and the mean duration of its steps in nanoseconds."""

    step: int = _NEVER
    step_ns: int = 0


class Ended(NamedTuple):
    """Record that a worker of an earlier round left in its `ReachedFile`.

    Args:
        reached: its last step.
        stored: newest snapshots in storage that it knew of.
        due: step of its next regular snapshot; `NO_STEP` if it is unknown.
        loss: `layout.Loss` of its last step.
        losses: faults up to its end.
        is_counted: True if a restore has counted the loss of its last steps.
    """

    reached: Reached
    stored: InStorage
    due: int = _NEVER
    loss: int = layout.Loss.UNKNOWN
    losses: Losses = Losses()
    is_counted: bool = False


class InStorage(NamedTuple):
    """Newest snapshot in storage that a worker knows of.

    Args:
        begun: step of the newest one that the ranks began to store.
        complete: step of the newest one that all ranks have stored.
    """

    begun: int = _NEVER
    complete: int = _NEVER


class ReachedFile:
    """File `reached-N` of this worker; without effect if it cannot be written.

    `begun` and `complete` (see `InStorage`), `due` (step of the next regular snapshot) and `cost`
    (cost of a snapshot in seconds) are written with each step. Threads may set them.
    """

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._path = folder / f"reached-{local_rank}"
        self._memory: mmap.mmap | None = None
        self._first: tuple[int, int] | None = None
        self.begun, self.complete = InStorage()
        self.due = _NEVER
        self._loss: int = layout.Loss.UNKNOWN
        self._losses, self._restored_ns = Losses(), time.monotonic_ns()
        self.cost = 0.0

    def restored(self, losses: Losses) -> None:
        """Record the losses with which a round begins, and measure its time from now on.

        The file has them before the first step, so that a restart up to then does not count the
        same fault again.
        """
        self._losses, self._restored_ns, self.cost = losses, time.monotonic_ns(), losses.cost
        packed = _LOSSES.pack(*losses, True)
        if self._memory is not None:
            self._memory[_LOSSES_AT:] = packed
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size >= _LOSSES_AT:  # not that of an earlier version
                    os.pwrite(fd, packed, _LOSSES_AT)
            finally:
                os.close(fd)

    def write(self, step: int) -> None:
        """Record that `step` is complete."""
        now = time.monotonic_ns()
        if self._first is None:
            self._first = (step, now)
            with contextlib.suppress(OSError, ValueError):
                self._memory = self._mapped()
        if self._memory is not None:
            fields = _REACHED.pack(step, now, *self._first, self.begun, self.complete)
            last = _LAST.pack(min(self.due, layout.MAX_STEP), self._loss)
            seconds = self._losses.seconds + (now - self._restored_ns) / 1e9
            losses = _LOSSES.pack(self._losses.faults, seconds, self.cost, False)
            self._memory[:] = fields + _CHECK.pack(binascii.crc32(fields)) + last + losses

    def would_lose(self, loss: int) -> None:
        """Record the reason for which the last step would be lost if this worker ended now.

        `loss` is a `layout.Loss`. Threads may call this.
        """
        self._loss = loss
        if self._memory is not None:
            self._memory[_LOSS_AT] = loss

    def _mapped(self) -> mmap.mmap:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, _MODE)
        try:
            os.pwrite(fd, bytes(_FILE_BYTES), 0)
            return mmap.mmap(fd, _FILE_BYTES)
        finally:
            os.close(fd)


def ended_on(folder: Path) -> list[Ended]:
    """Return the records of the workers of a node's earlier rounds."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.glob("reached-*"):
            with contextlib.suppress(OSError):
                ended = _decoded(path.read_bytes())
                if ended is not None:
                    found.append(ended)
    return found


def in_storage_of(folder: Path) -> InStorage:
    """Return the newest snapshot in storage that the workers of a node's earlier rounds knew."""
    found = [InStorage(), *(each.stored for each in ended_on(folder))]
    return InStorage(max(each.begun for each in found), max(each.complete for each in found))


def _decoded(content: bytes) -> Ended | None:
    fields, check = content[: _REACHED.size], content[_REACHED.size : _BYTES]
    if _CHECK.pack(binascii.crc32(fields)) != check:
        return None
    step, at_ns, first, first_ns, *stored = _REACHED.unpack(fields)
    mean_ns = (at_ns - first_ns) // (step - first) if step > first else 0
    found = Ended(Reached(step, mean_ns), InStorage(*stored))
    if len(content) < _BYTES + _LAST.size:
        return found
    due, loss = _LAST.unpack_from(content, _BYTES)
    found = found._replace(due=due, loss=layout.loss_of(loss))
    if len(content) < _FILE_BYTES:
        return found
    *numbers, is_counted = _LOSSES.unpack_from(content, _LOSSES_AT)
    if not all(math.isfinite(each) and 0 <= each < _MOST for each in numbers):
        return found
    return found._replace(losses=Losses(*numbers), is_counted=is_counted)


def lost_since(step: int, reached: Iterable[Reached]) -> dict[str, Any]:
    """Return the fields of a report after a restore of `step`: the steps that are repeated."""
    last = max(reached, default=Reached())
    if last.step < 0:
        return {"restored": step}
    lost = max(0, last.step - step)
    return {"restored": step, "lost": lost, "lost_ms": round(lost * last.step_ns / 1e6)}
