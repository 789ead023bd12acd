"""Calls to the storage of snapshots, each in a thread of its own: a call may never return.

A network disk that stops answering blocks a call in the kernel, where it cannot be cancelled.
Nothing waits longer than `SILENT_SECONDS` without progress; the thread ends once the disk answers.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version, complete_versions
from elasticjob.train.snapshots.memory.part_files import Body, StateChanged
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger("elasticjob.train")

SILENT_SECONDS = 30.0
"""Time without the return of a call after which storage does not answer."""
SOON_SECONDS = 2.0
"""Maximum wait for storage that training does not need: for its content when memory has a complete
snapshot, and once for a write that is still in progress when the next one is due."""
_LEAST_WAIT_SECONDS = 0.25
"""Minimum wait for a call: this process may have been suspended in the meantime."""
_OTHERS_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 1.0, 1.0)
_CACHE_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 3.0, 0.0)
"""Waits for a file of another node, after each look: network file systems cache names."""

T = TypeVar("T")


class StorageCall(threading.Thread, Generic[T]):
    """Call to storage in a daemon thread, for which the end of the process does not wait.

    Args:
        work: the call; its argument is a function to call after each step.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        super().__init__(name="elasticjob-storage", daemon=True)
        self._work = work
        self._moved_at = time.monotonic()
        self._result: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._work(self.moved)
        except Exception as error:
            self._error = error

    def moved(self) -> None:
        """Record progress."""
        self._moved_at = time.monotonic()

    def is_silent(self) -> bool:
        """Return True if the call has made no progress for `SILENT_SECONDS`."""
        return self.is_alive() and time.monotonic() - self._moved_at >= SILENT_SECONDS

    def has_ended(self, silent_seconds: float | None = None) -> bool:
        """Wait for the end; return False after this time, or `SILENT_SECONDS`, without progress."""
        limit = SILENT_SECONDS if silent_seconds is None else silent_seconds
        while self.is_alive():
            before = self._moved_at
            self.join(max(before + limit - time.monotonic(), _LEAST_WAIT_SECONDS))
            is_late = time.monotonic() - before >= limit
            if is_late and self._moved_at == before and self.is_alive():
                return False
        return True

    def result(self, silent_seconds: float | None = None) -> T:
        """Return the result or raise the error of the call; TimeoutError without progress."""
        if not self.has_ended(silent_seconds):
            raise no_answer()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def no_answer() -> TimeoutError:
    """Return the error of storage that does not answer."""
    return TimeoutError(errno.ETIMEDOUT, "the storage does not answer")


def called(work: Callable[[Callable[[], None]], T]) -> T:
    """Return the result of a call to storage. Raises its error, or TimeoutError."""
    call = StorageCall(work)
    call.start()
    return call.result()


def reason_of(error: Exception) -> str:
    """Return the text of an error of storage."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


class StorageWrite(StorageCall[None]):
    """Background write of parts to storage; `trouble` is the cause if it failed.

    With `keep`, for one rank, it also removes expired versions: before the write, so that they
    leave room, and after it. It passes the step of the newest complete version up to this one to
    `on_end`. `on_result` gets 0 after the write, or the errno of its failure.
    """

    def __init__(
        self,
        storage: StorageFolder,
        parts: list[tuple[Part, Body]],
        keep: int,
        on_end: Callable[[int], None],
        on_result: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(self._written)
        self._storage = storage
        self._parts = parts
        self._keep = keep
        self._on_end = on_end  # with the step of the newest complete version
        self._on_result = on_result
        self._is_awaited = threading.Event()
        self.trouble = ""

    def end(self) -> bool:
        """Wait until the parts are written; the parts of other ranks are waited for no longer.

        Returns False if the storage does not answer.
        """
        self.stop_waiting()
        return self.has_ended()

    def stop_waiting(self) -> None:
        """Wait for no parts of other ranks any more."""
        self._is_awaited.set()

    def _written(self, moved: Callable[[], None]) -> None:
        version = self._parts[0][0].version
        try:
            self._storage.claim(is_first=bool(self._keep))
            moved()
            if self._keep:
                self._storage.remove_expired(self._keep, version, moved)
            for part, body in self._parts:
                self._storage.store(part, body, moved)
            self._on_result(0)
            if self._keep:
                self._await_others(version, moved)
                complete = complete_versions(self._storage.scan(moved).parts)
                for newest in [each for each in complete if each <= version][-1:]:
                    self._on_end(newest.step)
                self._storage.remove_expired(self._keep, version, moved)
        except Exception as error:  # after any error the parts are not in storage
            self.trouble = f"{self._storage.folder}: {reason_of(error)}"
            self._on_result(getattr(error, "errno", None) or errno.EIO)
            log.warning("cannot write a snapshot to storage: %s", self.trouble)

    def _await_others(self, version: Version, moved: Callable[[], None]) -> None:
        """Wait for the parts of the other ranks, for a limited time."""
        for seconds in _OTHERS_SECONDS:
            if self._storage.is_complete(version) or self._is_awaited.wait(seconds):
                return
            moved()


class StorageWriter:
    """Writes of one rank to storage, of which one is in progress at most.

    While storage does not answer, further snapshots are not stored; nothing else waits for it.

    Args:
        on_stored: called in another thread with the step of the newest complete version.
        on_trouble: called, also in another thread, with the errno of a failed write, ETIMEDOUT
            while storage does not answer, and 0 once a write has succeeded.
    """

    def __init__(
        self,
        storage: StorageFolder,
        keep: int,
        on_stored: Callable[[int], None],
        on_trouble: Callable[[int], None],
    ) -> None:
        self._storage, self._keep = storage, keep
        self._on_stored, self._on_trouble = on_stored, on_trouble
        self._write: StorageWrite | None = None
        self._awaited: StorageWrite | None = None
        self._is_reported = False
        self._refused = ""

    def is_busy(self, is_due: bool) -> bool:
        """Return True while a write is in progress.

        If the next one is due, wait for this one first, once and for a short time: storage that is
        only a little slower than the training then has every snapshot that is due.
        """
        write = self._write
        if write is None or not write.is_alive():
            return False
        if is_due and self._awaited is not write:
            self._awaited = write
            write.join(SOON_SECONDS)
        return write.is_alive()

    def check(self) -> None:
        """Report storage that does not answer, and that it answers again. Returns at once."""
        write = self._write
        if write is None or self._is_reported == write.is_silent():
            return
        if not self._is_reported:
            self._is_reported = True
            self._on_trouble(errno.ETIMEDOUT)
            log.warning(
                "the storage of snapshots does not answer: %s: a write has made no progress for "
                "%d s. Training goes on; snapshots are not stored until it answers",
                self._storage.folder,
                SILENT_SECONDS,
            )
        elif not write.is_alive():
            self._is_reported = False
            log.warning("the storage of snapshots answers again: %s", self._storage.folder)

    def start(self, parts: list[tuple[Part, Body]]) -> None:
        """Write copies of the parts in the background, once the last write has ended.

        Raises StateChanged if the content of a part has changed before it was copied.
        """
        self._refused = ""
        if not self.end():
            self._refused = f"{self._storage.folder}: {no_answer().strerror}"
            return
        copies = [(part, Body(body.head_bytes, [_copy(body)])) for part, body in parts]
        if any(body.has_changed() for _, body in parts):
            raise StateChanged
        keep = self._keep if any(part.rank == SHARED for part, _ in parts) else 0
        self._write = StorageWrite(self._storage, copies, keep, self._on_stored, self._on_trouble)
        self._write.start()

    def give_up(self) -> None:
        """Let the write in progress, of a version that stays incomplete, wait for no other rank."""
        if self._write is not None:
            self._write.stop_waiting()

    def end(self) -> bool:
        """Wait for the write in progress; return False if storage does not answer."""
        ended = self._write is None or self._write.end()
        self.check()
        return ended

    def confirmed(self) -> str:
        """Wait for the write that `start` began; return the reason if it is not in storage."""
        ended = self.end()
        if self._refused or self._write is None:
            return self._refused
        return self._write.trouble if ended else f"{self._storage.folder}: {no_answer().strerror}"

    def unseen(self, version: Version) -> str:
        """Return an error unless this rank sees the shared part that rank 0 has written."""
        lookup = self.lookup(version)
        try:
            is_seen = lookup.result()
        except OSError as error:
            return f"{self._storage.folder}: {reason_of(error)}"
        if is_seen:
            return ""
        return (
            f"{self._storage.folder} lacks the part that rank 0 has written: Snapshots needs a "
            "folder that all nodes share, not one on a disk of each node"
        )

    def lookup(self, *versions: Version) -> StorageCall[bool]:
        """Look for the shared part of any of these versions in the background, in their order."""
        lookup = StorageCall(functools.partial(_is_seen, self._storage, versions))
        lookup.start()
        return lookup

    def remove_expired(self, version: Version) -> None:
        """Remove older versions after `version`. Raises OSError."""
        called(functools.partial(self._storage.remove_expired, self._keep, version))


class StoredOffer:
    """Parts in storage that one rank can offer to the others, read while they agree.

    Args:
        storage: None without storage: then there are no parts, and no trouble.
    """

    def __init__(self, storage: StorageFolder | None) -> None:
        self._storage = storage
        self._call = None if storage is None else StorageCall(storage.scan)
        if self._call is not None:
            self._call.start()
        self.parts: dict[Part, Path] = {}
        self.at = 0.0
        self.is_silent = self.is_listed = False
        self.trouble = self.owner = ""
        self.damaged: list[str] = []
        """Texts of the versions with a part that was committed, and is damaged."""

    def update(self, is_patient: bool) -> None:
        """Wait for the parts, for a short time unless `is_patient`."""
        if self._call is None or self._storage is None:
            return
        limit = SILENT_SECONDS if is_patient else min(SOON_SECONDS, SILENT_SECONDS)
        self.is_silent = not self._call.has_ended(limit)
        if self.is_silent:  # even if it ends now: the next call takes its result
            self.failed(no_answer())
            return
        ended, self._call = self._call, None
        try:
            stored = ended.result()
        except Exception as error:
            self.failed(error)
            return
        self.parts, self.at, self.is_listed, self.trouble = stored.parts, stored.at, True, ""
        for version, cause in list(stored.unreadable.items())[-1:]:
            self.trouble = f"{self._storage.folder}: step {version.step}: {reason_of(cause)}"
        self.owner = stored.owner
        for errors in stored.damaged.values():
            others = f", and {len(errors) - 1} more files" if len(errors) > 1 else ""
            self.damaged.append(f"{errors[0]}{others}")

    def failed(self, error: Exception) -> None:
        """Record that the content or a part cannot be read."""
        self.trouble = f"{getattr(self._storage, 'folder', '')}: {reason_of(error)}"


def _is_seen(
    storage: StorageFolder, versions: tuple[Version, ...], moved: Callable[[], None]
) -> bool:
    """Return True once the shared part of a version is seen, which another node has written."""
    for seconds in _CACHE_SECONDS:
        if any(storage.shared_part(version) is not None for version in versions):
            return True
        moved()
        time.sleep(seconds)
    return False


def _copy(body: Body) -> memoryview:
    return memoryview(b"".join(body.views))
