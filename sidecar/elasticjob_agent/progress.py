"""The files through which workers and their agent speak: see `elasticjob.layout`.

`round_<n>/<local_rank>/progress` and `saved` are written by a worker, `round_<n>/request` by us,
for all of this node's workers alike. They lie beside the logs, or in a folder of their own while
none are kept.
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
"""How often the workers' files are looked at."""
ASKED_POLL_SECONDS = 0.02
"""So often while they save before a stop: the next round waits for them."""
SEEN_SECONDS = 0.005
"""After this a request that was written is seen by whoever looks: no store is on its way."""
DISK_SECONDS = 5.0
TRIES = 3
"""A record that is being written is whole a moment later."""


class ProgressFiles:
    """One agent's; `folder` is that of the logs. `shared`: workers may be another user."""

    def __init__(self, folder: Path | None, shared: bool = False) -> None:
        self._folder = folder
        self._shared = shared
        self._made: ScratchFolder | None = None

    def prepare(self, number: int, slots: int) -> None:
        """Make what the round's workers are told of, blank. Raises OSError."""
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
        """Where a worker tells its progress."""
        return self._round(number) / str(local_rank) / "progress"

    def saved_file(self, number: int, local_rank: int) -> Path:
        """Where a worker tells its checkpoints, if it tells nothing else."""
        return self._round(number) / str(local_rank) / "saved"

    def request_file(self, number: int) -> Path:
        """Where the round's workers here are asked to save."""
        return self._round(number) / "request"

    def read(self, number: int, slots: int) -> dict[int, WorkerProgress]:
        """What the workers of a round said last, by local rank."""
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
        """Ask the round's workers to save, tell them where, or no longer. Raises OSError.

        A worker may look at any moment: what it must not see half written comes last.
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
        """Remove the folder, if it is our own."""
        if self._made is not None:
            self._made.close()

    def _round(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round_{number}"

    def _write(self, path: Path, content: bytes) -> None:
        """A new file, for a worker of an earlier run may still hold the old one."""
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(_READABLE)

    def _prune(self, current: int) -> None:
        assert self._folder is not None
        for entry in self._folder.iterdir():
            if (match := _ROUND.fullmatch(entry.name)) and int(match[1]) != current:
                shutil.rmtree(entry, ignore_errors=True)


def read_progress(path: Path) -> WorkerProgress | None:
    """What a progress file says, if it is one. It is written by user code: nothing is trusted."""
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
    """A small file of the user's and when it was written, in nanoseconds."""
    with contextlib.suppress(OSError):
        # Not blocking: a user's script may have put a pipe there.
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
    """Post what running workers say, whenever it is something new; soon, once they are asked."""
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
