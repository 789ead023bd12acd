"""Snapshots of one rank in storage: schedule, writes, and reports of complete snapshots.

At most one write of this rank is in progress. Errors of storage are reported and do not end the
training, unless the script has requested the snapshot with `save(store=True)`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from elasticjob import layout, train
from elasticjob.train.snapshots.core.agreement import STORAGE, SnapshotError, Version
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.storage.calls import StorageCall, StorageWriter
from elasticjob.train.snapshots.storage.storage_folder import other_owner

if TYPE_CHECKING:
    from elasticjob.train.snapshots.core.agreement import Part, Plan
    from elasticjob.train.snapshots.job import Report
    from elasticjob.train.snapshots.memory.part_files import Body
    from elasticjob.train.snapshots.memory.reached_step import ReachedFile
    from elasticjob.train.snapshots.ranks.gang import Gang
    from elasticjob.train.snapshots.restoring import Agreed
    from elasticjob.train.snapshots.storage.storage_folder import StorageFolder

log = logging.getLogger("elasticjob.train")


class SnapshotStore:
    """Snapshots of this rank in storage.

    Args:
        folder: the storage; None if this rank has none.
        job: this job, as far as this rank knows; empty if it is unknown.
        keep: number of complete snapshots to keep.
        every_steps: minimum number of steps between two snapshots, without `every_seconds`.
        every_seconds: alternatively the minimum time between two snapshots.
        report: report of this worker.
        reached: file that passes the steps of the newest snapshots to the next round.
    """

    def __init__(
        self,
        folder: StorageFolder | None,
        job: str,
        keep: int,
        every_steps: int,
        every_seconds: float | None,
        report: Report,
        reached: ReachedFile | None,
    ) -> None:
        self.folder = folder
        self.job, self._owner = job, ""
        self.is_shared = folder is not None
        """True if any rank has storage; before the first exchange, True if this one has."""
        self.complete_step = layout.NO_STEP
        """Step of the newest snapshot that is complete in storage, as far as this rank knows."""
        self._reported_step = layout.NO_STEP
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._step, self._at = 0, 0.0
        self._former: tuple[int, float, int] | None = None
        """`_step`, `_at` and the begun step before the last `begins`."""
        self._report, self._reached = report, reached
        self._writer = (
            None
            if folder is None
            else StorageWriter(folder, keep, self._is_complete, report.storage)
        )
        self._has_warned = False
        self._last: Version | None = None
        """Last version that the ranks of this gang have begun to store."""
        self._lookup: StorageCall[bool] | None = None
        """Check of a rank other than 0, once in a gang, that it sees the part of rank 0."""
        self._has_looked_up = False

    @property
    def is_timed(self) -> bool:
        """True if the interval is in seconds, so that the ranks must agree on each snapshot."""
        return self.is_shared and self._every_seconds is not None

    def is_due(self, step: int) -> bool:
        """Return True if the snapshot of this step is due by the number of steps, on all ranks."""
        by_steps = self.is_shared and self._every_seconds is None
        return by_steps and step - self._step >= self._every_steps

    def is_time(self) -> bool:
        """Return True if a snapshot is due by this rank's clock, which may have been set back."""
        now = time.time()
        self._at = min(self._at, now)
        return self.is_timed and now - self._at >= (self._every_seconds or 0.0)

    def is_busy(self, is_due: bool) -> bool:
        """Return True while a write is in progress, after a short wait if the next one is due."""
        return self._writer is not None and self._writer.is_busy(is_due)

    def restored(self, agreed: Agreed) -> None:
        """Continue after a restore: set the newest stored steps, the job and the storage's owner.

        All ranks use the job and the owner on which they have agreed. A rank that does not know its
        job would otherwise make other calls than those that do.
        """
        self.job, self._owner = agreed.job, agreed.owner
        if self.folder is not None:
            self.folder.job = agreed.job
        self._last = self._lookup = None
        self._step = max(agreed.stored.begun, 0)
        self._at = 0.0 if self._every_seconds is None else agreed.stored_at
        self._former = None
        if self._reached is not None:
            self._reached.begun, self._reached.complete = agreed.stored

    def begins(self, gang: Gang, step: int, has_ended: bool) -> None:
        """Record that the ranks store the snapshot of this step.

        Args:
            has_ended: True if no rank writes the previous snapshot any more. This rank then checks
                that it sees the part of rank 0 of that one, or of this one: with `keep=1` rank 0
                removes the previous one. False for a requested snapshot, which `confirm` checks.
        """
        version = Version(step, gang.number)
        is_first = gang.rank > 0 and self._lookup is None
        if is_first and has_ended and self._last is not None and self._writer is not None:
            self._lookup = self._writer.lookup(self._last, version)
        self._last = version
        begun = layout.NO_STEP if self._reached is None else self._reached.begun
        self._former = self._step, self._at, begun
        self._step, self._at = step, time.time()
        if self._reached is not None:
            self._reached.begun = step
            self._reached.write(step)

    def give_up(self, step: int) -> bool:
        """Give up the last snapshot, if it is of this step; return True if it was to be stored.

        The next snapshot is stored instead.
        """
        if self._step != step or self._former is None:
            return False
        self._step, self._at, begun = self._former
        self._former = self._last = None
        if self._reached is not None:
            self._reached.begun = begun
        if self._writer is not None:
            self._writer.give_up()
        return True

    def write(self, parts: list[tuple[Part, Body]]) -> None:
        """Write copies of the parts in the background."""
        if parts and self._writer is not None:
            self._writer.start(parts)

    def record_complete(self, step: int) -> None:
        """Record that all ranks have stored a snapshot, for the next round."""
        if self._reached is not None:
            self._reached.complete = max(step, self._reached.complete)

    def report_complete(self) -> None:
        """Report the newest complete snapshot as a checkpoint, in the thread of the script."""
        if self._writer is not None:
            self._writer.check()
        self._check_lookup()
        step = self.complete_step
        if step > self._reported_step and train.link().stored(step):
            self._reported_step = step

    def _check_lookup(self) -> None:
        """Log a warning, once, if this rank does not see the part of rank 0 in storage."""
        lookup = self._lookup
        if lookup is None or lookup.is_alive() or self._has_looked_up or self.folder is None:
            return
        self._has_looked_up = True
        with contextlib.suppress(OSError):  # the next write reports it
            if not lookup.result():
                log.warning(
                    "%s lacks the part of rank 0 of a snapshot: unless rank 0 reports an error, "
                    "this is not a folder that all nodes share, and the loss of a node loses "
                    "snapshots",
                    self.folder.folder,
                )

    def confirm(self, gang: Gang, number: int, lacks_storage: bool) -> None:
        """Wait until all ranks have written their parts of the last snapshot, of gang `number`.

        Raises:
            SnapshotError: a rank has not, or does not see the shared part, as in a folder that is
                not shared; on all ranks, with the rank and its error.
        """
        version = Version(self._step, number)
        trouble = "" if self._writer is None else self._writer.confirmed()
        if lacks_storage or (gang.rank == 0 and self.folder is None):
            trouble = "Snapshots has no storage on this rank: give it on all ranks"
        _check_stored(gang, trouble)
        if gang.size > 1:  # the shared part is there
            _check_stored(gang, "" if self._writer is None else self._writer.unseen(version))
        self.record_complete(self._step)
        if self._reached is not None:
            self._reached.write(self._step)
        if gang.rank == 0 and self._writer is not None and self.folder is not None:
            self._is_complete(self._step)
            try:
                self._writer.remove_expired(version)
            except OSError as error:  # the next write removes them
                log.warning(
                    "cannot remove older snapshots from storage: %s: %s",
                    self.folder.folder,
                    error.strerror,
                )

    @property
    def is_of_other_job(self) -> bool:
        """True if the storage belongs to another job, on all ranks."""
        return bool(self.job) and self._owner not in ("", self.job)

    def may_keep(self, plan: Plan) -> bool:
        """Return True if the parts of this plan may be written to memory, on all ranks.

        The memory must have snapshots of this job alone. Storage without an owner, written by an
        earlier version of the library, may have those of another job.
        """
        if not self.job or self._owner == self.job:
            return True
        is_ours = any(source.place != STORAGE for source in (plan.shared, *plan.own))
        return is_ours and not self.is_of_other_job

    def check_owner(self) -> None:
        """Raise SnapshotError, on all ranks, if the storage belongs to another job."""
        if self.is_of_other_job:
            raise SnapshotError(self._of_other_job())

    def warn_of_owner(self) -> None:
        """Log a warning if the storage belongs to another job; the first `save` is an error."""
        if self.is_of_other_job:
            log.warning("%s. The first save() is an error", self._of_other_job())

    def _of_other_job(self) -> str:
        folder = "the storage" if self.folder is None else self.folder.folder
        return f"{folder}: {other_owner(self._owner, self.job)}"

    def check_demanded(self, gang: Gang, store: bool) -> None:
        """Raise SnapshotError if `store` is true and no rank has storage; if false, warn once."""
        if self.is_shared:
            return
        text = (
            "there is no storage for save(store=...): give Snapshots a folder that all nodes "
            "share, set recovery.snapshots.storage in the job, or leave out store"
        )
        if store:
            raise SnapshotError(text)
        if gang.rank == 0 and not self._has_warned and train.link().has_agent:
            log.warning("%s. The first call with a true value is an error", text)
        self._has_warned = True

    def end(self) -> bool:
        """Wait for the write in progress; return False if storage does not answer."""
        return self._writer is None or self._writer.end()

    def _is_complete(self, step: int) -> None:
        self._report.change(stored=step)
        self.complete_step = step
        self.record_complete(step)


def _check_stored(gang: Gang, trouble: str) -> None:
    """Raise SnapshotError on all ranks if one has an error."""
    contents = gang.gather(Exchange.STORED, trouble.encode())
    texts = [bytes(content).decode() for content in contents]
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        train.link().save_failed("; ".join(failed))
        raise SnapshotError(f"the snapshot is not in storage: {'; '.join(failed)}")
