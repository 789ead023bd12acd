"""Files of a node's workers: logs, error files, progress and requests.

The log folder is `round_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`. The worker
runtime writes the streams and the workers write their error files. This module creates the
folders, removes old rounds, and stores the base rank of a round for a restarted agent. A full
or read-only disk never stops training: `prepare` raises, and the round runs without files.

A worker writes `round_<n>/<local_rank>/progress` and `saved`; the agent writes
`round_<n>/request`, which all workers of this node share; format: `elasticjob.layout`. These
files are in the log folder, or in a temporary folder if no logs are kept.

User code writes error and progress files, so nothing in them is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from elasticjob import layout
from elasticjob_agent.core.events import Event, WorkersProgressed
from elasticjob_agent.core.progress import TEXT_BYTES, WorkerProgress, with_saved, worker_progress
from elasticjob_agent.core.state import State
from elasticjob_agent.settings import LogSettings
from elasticjob_agent.tempdirs import TempDir
from elasticjob_agent.threads import in_thread

MAX_ERROR_BYTES = 1024 * 1024


def read_error_file(path: Path) -> bytes | None:
    """Return the content; None if the file is missing, empty, too large, or not a regular file."""
    found = _read_file(path, MAX_ERROR_BYTES)
    return found[0] or None if found is not None else None


def _read_file(path: Path, max_bytes: int, tail: int = 0) -> tuple[bytes, int] | None:
    """Return the content and modification time (ns) of a regular file within the limit, or None.

    With `tail`, the bytes from that offset on are read before those in front of it.
    """
    with contextlib.suppress(OSError):
        # Non-blocking: a user's script may have created a pipe there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > max_bytes:
                return None
            content = os.pread(descriptor, max_bytes, tail)
            if tail:
                content = os.pread(descriptor, tail, 0) + content
            return content, about.st_mtime_ns
        finally:
            os.close(descriptor)
    return None


def read_error_files(paths: Mapping[int, Path]) -> dict[int, bytes]:
    """Return the contents of the readable files, by local rank."""
    found = ((local_rank, read_error_file(path)) for local_rank, path in paths.items())
    return {local_rank: content for local_rank, content in found if content is not None}


_ROUND = re.compile(r"round_(\d+)")
_BASE_RANK = "base_rank"
_OPEN_TO_ALL = 0o1777


def command_log_folder(settings: LogSettings) -> Path | None:
    """Create and return the folder for the output of a node's command; None for none."""
    if settings.folder is None or not settings.output:
        return None
    folder = settings.folder / "command"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if settings.shared:
            folder.chmod(_OPEN_TO_ALL)
    except OSError:
        return None
    return folder


class RunLogs:
    """Log folder of one agent."""

    def __init__(self, settings: LogSettings) -> None:
        self._folder = settings.folder
        self._keep = settings.keep_rounds
        self._shared = settings.shared
        self._output = settings.output

    def preload_file(self) -> str:
        """Return the path where the launcher keeps the modules to preload; "" for none."""
        if self._folder is None or not self._output:
            return ""
        return str(self._folder / "preload.json")

    def worker(self, round_: int, local_rank: int) -> Path | None:
        """Return the folder of one worker's output; None if output is not kept."""
        return self._worker(round_, local_rank) if self._output else None

    def error_file(self, round_: int, local_rank: int) -> Path | None:
        folder = self._worker(round_, local_rank)
        return None if folder is None else folder / "error.json"

    def prepare(self, round_: int, slots: int, base_rank: int) -> None:
        """Create the folders of a round and remove the oldest rounds. Raises OSError."""
        if self._folder is None:
            return
        for local_rank in range(slots):
            folder = self._round(round_) / str(local_rank)
            folder.mkdir(parents=True, exist_ok=True)
            # An earlier run of the same name may have left one.
            (folder / "error.json").unlink(missing_ok=True)
            if self._shared:
                folder.chmod(_OPEN_TO_ALL)
        (self._round(round_) / _BASE_RANK).write_text(f"{base_rank}\n")
        self._prune(round_)

    def reports(self, round_: int, slots: int) -> Mapping[int, bytes]:
        """Return the contents of a round's error files, by local rank."""
        paths = {rank: self.error_file(round_, rank) for rank in range(slots)}
        return read_error_files({rank: path for rank, path in paths.items() if path is not None})

    def base_rank(self, round_: int) -> int | None:
        """Return the base rank that `prepare` stored for a round; None if there is none."""
        if self._folder is None:
            return None
        try:
            return int((self._round(round_) / _BASE_RANK).read_text())
        except (OSError, ValueError):
            return None

    def _worker(self, round_: int, local_rank: int) -> Path | None:
        return None if self._folder is None else self._round(round_) / str(local_rank)

    def _round(self, round_: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round_{round_}"

    def _prune(self, current: int) -> None:
        assert self._folder is not None
        numbers = sorted(
            int(match[1])
            for entry in self._folder.iterdir()
            if (match := _ROUND.fullmatch(entry.name)) and not entry.is_symlink()
        )
        for number in numbers[: -self._keep]:
            if number != current:
                shutil.rmtree(self._round(number), ignore_errors=True)


_READABLE = 0o644
POLL_SECONDS = 0.25
"""Interval at which the agent reads the workers' files."""
REQUEST_POLL_SECONDS = 0.02
"""Interval while workers save before a stop: the next round waits for them."""
SEEN_SECONDS = 0.005
"""Time after which every worker that reads a written request sees it: no store is in flight."""
TRIES = 3
"""Maximum reads of a file: a record that is being written is complete a moment later."""


class ProgressFiles:
    """Progress and request files of one agent.

    `folder` is the log folder; None for a temporary one. `shared`: workers may run as another user.
    """

    def __init__(self, folder: Path | None, shared: bool = False) -> None:
        self._folder = folder
        self._shared = shared
        self._made: TempDir | None = None

    def prepare(self, number: int, slots: int) -> None:
        """Create the round's folders and an empty request, and remove old files. Raises OSError."""
        if self._folder is None:
            self._made = TempDir("progress")
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
            progress = read_progress(self.file(number, rank))
            saved = _read_file(self.saved_file(number, rank), TEXT_BYTES)
            if saved is not None:
                progress = with_saved(progress or WorkerProgress(), *saved)
            if progress is not None:
                found[rank] = progress
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
    """Return the content of a progress file, None if invalid. User code writes it: untrusted.

    The answer is read before the rest. A worker writes it last, so the step of a reported
    checkpoint is never older than the report.
    """
    for _ in range(TRIES):
        opened = _read_file(path, TEXT_BYTES, layout.ANSWER_START)
        if opened is None:
            return None
        content, written_ns = opened
        found = worker_progress(content, written_ns // 1_000_000)
        if found is not None and not _is_torn(content, found):
            return found
    return None


def _is_torn(content: bytes, found: WorkerProgress) -> bool:
    """Return True if the answer was read while the worker wrote it."""
    is_text = content[:1] == b"{"
    return found.answer is None and not is_text and len(content) >= layout.LOSS_START


async def post_progress(
    files: ProgressFiles,
    state: Callable[[], State],
    post: Callable[[Event], None],
    requested: asyncio.Event,
) -> None:
    """Post the progress of running workers when it changes; poll fast after a save request."""
    while True:
        group = state().group
        if group is not None and group.request is not None and not group.empty:
            await asyncio.sleep(REQUEST_POLL_SECONDS)
        else:
            requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await requested.wait()
        group = state().group
        if group is None or group.empty or not group.started:
            continue
        # No timeout: a disk that does not answer holds one thread, not one for each poll.
        try:
            found = await in_thread(partial(files.read, group.round, group.slots))
        except OSError:
            continue
        if found and found != group.progress:
            post(WorkersProgressed(group.round, found, time.time_ns() // 1_000_000))
