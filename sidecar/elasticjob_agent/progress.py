"""Progress and request files between workers and their agent; format: `elasticjob.layout`.

A worker writes `round_<n>/<local_rank>/progress` and `saved`; the agent writes `round_<n>/request`,
which all workers of this node share. The files are in the log folder, or in a temporary folder if
no logs are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from elasticjob import layout
from elasticjob_agent.core.model import Event, State, WorkersProgressed
from elasticjob_agent.core.progress import TEXT_BYTES, WorkerProgress, with_saved, worker_progress
from elasticjob_agent.scratch import ScratchFolder

_ROUND = re.compile(r"round_(\d+)")
_OPEN_TO_ALL = 0o1777
_READABLE = 0o644
POLL_SECONDS = 0.25
"""Interval at which the agent reads the workers' files."""
ASKED_POLL_SECONDS = 0.02
"""Interval while workers save before a stop: the next round waits for them."""
SEEN_SECONDS = 0.005
"""Time after which every worker that reads a written request sees it: no store is in flight."""
DISK_SECONDS = 5.0
TRIES = 3
"""Maximum reads of a file: a record that is being written is complete a moment later."""


class ProgressFiles:
    """Progress and request files of one agent.

    `folder` is the log folder; None for a temporary one. `shared`: workers may run as another user.
    """

    def __init__(self, folder: Path | None, shared: bool = False) -> None:
        self._folder = folder
        self._shared = shared
        self._made: ScratchFolder | None = None

    def prepare(self, number: int, slots: int) -> None:
        """Create the round's folders and an empty request, and remove old files. Raises OSError."""
        if self._folder is None:
            self._made = ScratchFolder("progress")
            self._folder = self._made.path
        for local_rank in range(slots):
            path = self.file(number, local_rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self.saved_file(number, local_rank).unlink(missing_ok=True)
            if self._shared:
                path.parent.chmod(_OPEN_TO_ALL)
        self._write(self.request_file(number), layout.pack_request(None))
        if self._made is not None:
            self._prune(number)

    def file(self, number: int, local_rank: int) -> Path:
        """Return the path where a worker writes its progress."""
        return self._round(number) / str(local_rank) / "progress"

    def saved_file(self, number: int, local_rank: int) -> Path:
        """Return the path where a worker that reports nothing else writes its checkpoints."""
        return self._round(number) / str(local_rank) / "saved"

    def request_file(self, number: int) -> Path:
        """Return the path of the request to this node's workers of a round to save."""
        return self._round(number) / "request"

    def read(self, number: int, slots: int) -> dict[int, WorkerProgress]:
        """Return the latest progress of a round's workers, by local rank."""
        if self._folder is None:
            return {}
        found = {}
        for rank in range(slots):
            said = read_progress(self.file(number, rank))
            saved = _opened(self.saved_file(number, rank))
            if saved is not None:
                said = with_saved(said or WorkerProgress(), *saved)
            if said is not None:
                found[rank] = said
        return found

    def ask(self, number: int, request: layout.Request | None) -> None:
        """Write a request to save, with the save point once it is agreed; None withdraws it.

        A worker may read at any moment: the order of the writes never leaves a request that is
        valid but incomplete. Raises OSError.
        """
        line = layout.pack_request(request)
        descriptor = os.open(
            self.request_file(number), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        try:
            order = layout.WRITE_ORDER if request else layout.WRITE_ORDER[::-1]
            for start, end in order:
                os.pwrite(descriptor, line[start:end], start)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the folder if this object created it."""
        if self._made is not None:
            self._made.close()

    def _round(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round_{number}"

    def _write(self, path: Path, content: bytes) -> None:
        """Write a new file: a worker of an earlier run may still have the old one open."""
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(_READABLE)

    def _prune(self, current: int) -> None:
        assert self._folder is not None
        for entry in self._folder.iterdir():
            if (match := _ROUND.fullmatch(entry.name)) and int(match[1]) != current:
                shutil.rmtree(entry, ignore_errors=True)


def read_progress(path: Path) -> WorkerProgress | None:
    """Return the content of a progress file, None if invalid. User code writes it: untrusted."""
    for _ in range(TRIES):
        opened = _opened(path)
        if opened is None:
            return None
        content, written_ns = opened
        found = worker_progress(content, written_ns // 1_000_000)
        if found is not None:
            return found
    return None


def _opened(path: Path) -> tuple[bytes, int] | None:
    """Return the content and modification time (ns) of a small regular file; else None."""
    with contextlib.suppress(OSError):
        # Non-blocking: a user's script may have created a pipe there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > TEXT_BYTES:
                return None
            return os.pread(descriptor, TEXT_BYTES, 0), about.st_mtime_ns
        finally:
            os.close(descriptor)
    return None


async def follow(
    files: ProgressFiles,
    state: Callable[[], State],
    post: Callable[[Event], None],
    asked: asyncio.Event,
) -> None:
    """Post the progress of running workers when it changes; poll fast after a save request."""
    while True:
        crew = state().crew
        if crew is not None and crew.asked is not None and not crew.empty:
            await asyncio.sleep(ASKED_POLL_SECONDS)
        else:
            asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await asked.wait()
        crew = state().crew
        if crew is None or crew.empty or not crew.started:
            continue
        try:
            async with asyncio.timeout(DISK_SECONDS):
                found = await asyncio.to_thread(files.read, crew.round, crew.slots)
        except TimeoutError:
            continue
        if found and found != crew.progress:
            post(WorkersProgressed(crew.round, found, time.time_ns() // 1_000_000))
