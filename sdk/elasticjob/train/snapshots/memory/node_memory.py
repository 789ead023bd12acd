"""Snapshots of one rank in the memory of its node, and the handling of its errors.

If the memory is full or cannot be written, training continues: the worker reports it, logs one
warning, and takes snapshots in storage alone. Memory that was full is used again once it has room.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from elasticjob import layout
from elasticjob.train.snapshots.job import refused_memory
from elasticjob.train.snapshots.memory.buffers import BUFFERS, LockRefused, MemoryBuffers, NoRoom
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.snapshots.memory.reached_step import Ended, ended_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticjob.train.snapshots.core.agreement import Part, Version
    from elasticjob.train.snapshots.job import Report

log = logging.getLogger("elasticjob.train")

MAX_PAUSE = 16
"""Largest number of regular snapshots after which memory that was full is examined again."""


class NodeMemory:
    """Snapshots of this rank in the memory of its node.

    Args:
        environ: variables of the process, with the folder or the error of the launcher.
        local_rank, local_ranks: rank on the node, and number of ranks there; 0 if it is unknown.
        limit: bytes that the job allows for the snapshots of a node; 0 without a limit.
        has_storage: True if this rank has storage, for messages.
        report: report of this worker.

    Attributes:
        buffers: the memory; None without a folder, and while it cannot be used.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        local_rank: int,
        local_ranks: int,
        limit: int,
        has_storage: bool,
        report: Report,
    ) -> None:
        folder = environ.get(layout.SNAPSHOT_FOLDER, "")
        self.buffers = (
            MemoryBuffers(Path(folder), local_rank, limit, local_ranks) if folder else None
        )
        self._local_rank, self._limit, self._report = local_rank, limit, report
        self._refused = None if folder else refused_memory(environ)
        self._place_left = (
            "with snapshots in storage" if has_storage else "without snapshots of this node"
        )
        self._has_removed = False
        self._full: tuple[MemoryBuffers, int] | None = None
        """Memory without room, and the bytes that it must have free to be used again."""
        self._times_full = self._pause = 0
        self.lacks_room = False
        """True from a write that failed for lack of room to the next complete snapshot."""

    @property
    def folder(self) -> Path | None:
        """Folder of the memory, also while it is full; None if it cannot be used."""
        buffers = self.buffers if self._full is None else self._full[0]
        return None if buffers is None else buffers.folder

    def ended(self) -> list[Ended]:
        """Return the records of the workers of earlier rounds on this node."""
        return [] if self.folder is None else ended_on(self.folder)

    def report_refusal(self) -> None:
        """Report and log, once, that the launcher could not create its folder."""
        refused, self._refused = self._refused, None
        if refused is None:
            return
        self._report.change(trouble=layout.unusable(refused.errno))
        if self._local_rank == 0:
            log.warning(
                "no snapshots in the memory of this node: cannot create a folder in %s: %s. "
                "Training goes on %s",
                refused.filename,
                refused.strerror,
                self._place_left,
            )

    def commit(self, part: Part, body: Body, size: int = 0) -> bool:
        """Commit a part of a snapshot of `size` bytes; after an error, stop using the memory.

        Returns False if only this snapshot failed, because another worker of this node holds the
        lock: the ranks must then give up this snapshot.
        """
        buffers = self.buffers
        return buffers is None or self._write(buffers, buffers.commit, part, body, size)

    def completed(self) -> None:
        """Report that memory which was full has a complete snapshot again."""
        if self.lacks_room and self.buffers is not None:
            self.lacks_room = False
            self._report.change(trouble=layout.FITS)
            log.warning("snapshots in the memory of this node again: %s", self.buffers.folder)

    def examine(self) -> None:
        """Check, before a regular snapshot, if memory that was full has room, and use it again.

        The number of snapshots between two checks doubles with each failure, up to `MAX_PAUSE`.
        """
        if self._full is None:
            return
        self._pause -= 1
        buffers, needed = self._full
        with contextlib.suppress(OSError):
            found = os.statvfs(buffers.folder)
            if self._pause <= 0 and found.f_bavail * found.f_frsize >= needed:
                self.read_again()

    def read_again(self) -> None:
        """Use memory again that was full, for a restore: a read needs no room."""
        if self._full is not None:
            self.buffers, self._full = self._full[0], None

    def _write(
        self,
        buffers: MemoryBuffers,
        write: Callable[[Part, Body], None],
        part: Part,
        body: Body,
        size: int = 0,
    ) -> bool:
        was_refused = buffers.is_refused
        try:
            write(part, body)
        except LockRefused as error:
            if not was_refused:
                log.warning(
                    "no snapshot of step %d in the memory of this node: %s: %s. The last one "
                    "remains, until the other worker has ended",
                    part.version.step,
                    buffers.folder,
                    error.strerror,
                )
            return False
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
            may_end = full and not isinstance(error, NoRoom)
            trouble = layout.NO_ROOM if full else layout.unusable(error.errno)
            needed = -(-error.needed // BUFFERS) if isinstance(error, NoRoom) else body.size
            self._report.change(trouble=trouble, size=needed)
            log.log(
                logging.DEBUG if self.lacks_room and may_end else logging.WARNING,
                "no more snapshots in the memory of this node: %s: %s%s. Training goes on %s",
                buffers.folder,
                error.strerror,
                _remedy(error, body) if full else "",
                self._place_left,
            )
            self.buffers = None
            if may_end:
                self._times_full += 1
                self._pause = min(2**self._times_full, MAX_PAUSE)
                size = max(size, body.size)
                self._full = buffers, size + size // 8
                self.lacks_room = True
        return True

    def seed(self, part: Part, body: Body) -> None:
        """Commit a restored part if this node lacks it, so that a second fault can restore it."""
        if self.buffers is not None and not self.buffers.restored(part):
            self._write(self.buffers, self.buffers.seed, part, body)

    def keep(self, version: Version) -> None:
        """Keep the parts of a version that all ranks have until the next ones are committed."""
        if self.buffers is not None:
            self.buffers.keep(version)

    def remove_former(self, keep: Version | None) -> None:
        """Remove the parts of local ranks that no longer exist, once the gang has a snapshot.

        Without `keep` this is done once in a round, since no worker starts later.
        """
        if self._local_rank == 0 and self.buffers is not None and not self._has_removed:
            self._has_removed = keep is None
            self.buffers.remove_former(keep)


def _remedy(error: OSError, body: Body) -> str:
    if isinstance(error, NoRoom):
        return "; enlarge recovery.snapshots.memoryLimit and the memory limit"
    size = f"{BUFFERS} snapshots of {body.size} bytes"
    return f": {size} must fit; enlarge /dev/shm and the memory limit"
