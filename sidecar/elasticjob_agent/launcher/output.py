"""Where the workers' output goes: the launcher's own streams and bounded log files.

A worker must never wait for a slow reader, a slow or a full disk. So each target is written by a
thread of its own behind a queue of bounded size; what does not fit is left out, and a note says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .boundedlog import BoundedLog

QUEUE_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 128
"""What a piece in the queue takes beside its content: a worker may write a few bytes at a time."""


class Target:
    """One place to write to; `write` and `close` run on the writer's thread."""

    lost_bytes = 0  # left out because the queue was full; kept by the queue's owner

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class StreamTarget(Target):
    """The launcher's standard output or error. It may be shared, so its flags are left alone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._broken = False

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._broken:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                select.select([], [self._fd], [])
            except OSError:
                self._broken = True  # its reader is gone for good
                raise

    def close(self) -> None:
        """Not ours to close."""


class LogTarget(Target):
    """A worker's log file."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._log = BoundedLog(path, max_bytes)
        self.path = path

    def write(self, data: bytes) -> None:
        try:
            self._log.write(data)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        self._log.close()


class Writer:
    """A thread that writes what it is given in order; `put` and `close` never wait."""

    def __init__(self, name: str, on_trouble: Callable[[OSError], None]) -> None:
        self._on_trouble = on_trouble
        self._queue: deque[tuple[Target, bytes | None]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def put(self, target: Target, data: bytes) -> None:
        with self._changed:
            if self._queued_bytes + _cost(data) > QUEUE_BYTES:
                target.lost_bytes += len(data)
                return
            self._append(target, _note_of_loss(target) + data)

    def close(self, target: Target) -> None:
        """Close the target once what was put before is written."""
        with self._changed:
            self._append(target, _note_of_loss(target))
            self._append(target, None)

    def flush(self, deadline: float) -> None:
        """Wait until all is written or the monotonic `deadline` has passed."""
        with self._changed:
            while self._queue and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))

    def _append(self, target: Target, data: bytes | None) -> None:
        self._queue.append((target, data))
        self._queued_bytes += _cost(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                target, data = self._queue[0]
            try:
                target.close() if data is None else target.write(data)
            except OSError as error:
                self._on_trouble(error)
            with self._changed:
                # Only now, so that flush also waits for the piece in hand.
                self._queue.popleft()
                self._queued_bytes -= _cost(data)
                self._changed.notify_all()


def _cost(data: bytes | None) -> int:
    return len(data or b"") + PIECE_BYTES


def _note_of_loss(target: Target) -> bytes:
    """Says what was left out since the last note; empty when nothing was."""
    lost_bytes, target.lost_bytes = target.lost_bytes, 0
    if not lost_bytes:
        return b""
    return b"[elasticjob] %d bytes left out: the reader or the disk is too slow\n" % lost_bytes


class Output:
    """The launcher's two streams and all log files, with trouble reported once a kind."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self._said: set[str] = set()
        self._streams = (StreamTarget(1), StreamTarget(2))
        self._stream_writers = (
            Writer("stdout", lambda error: self._stream_trouble("standard output", error)),
            Writer("stderr", lambda error: self._stream_trouble("standard error", error)),
        )
        self._log_writer = Writer("logs", self._log_trouble)

    def forward(self, stream: int, data: bytes) -> None:
        """Write to the launcher's standard output (1) or error (2)."""
        self._stream_writers[stream - 1].put(self._streams[stream - 1], data)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.forward(2, f"[elasticjob] {text}\n".encode(errors="replace"))

    def log(self, target: LogTarget, data: bytes) -> None:
        self._log_writer.put(target, data)

    def close_log(self, target: LogTarget) -> None:
        self._log_writer.close(target)

    def flush(self, within_seconds: float) -> None:
        """Write what is queued; a reader or disk that does not take it in time loses it."""
        deadline = time.monotonic() + within_seconds
        for writer, stream in zip(self._stream_writers, self._streams):
            writer.close(stream)
        for writer in (self._log_writer, *self._stream_writers):
            writer.flush(deadline)

    def _stream_trouble(self, name: str, error: OSError) -> None:
        self._once(name, f"the launcher's {name} cannot be written: {error.strerror}")

    def _log_trouble(self, error: OSError) -> None:
        self._once(
            "logs",
            f"log file {error.filename} cannot be written: {error.strerror}; training goes on "
            "and output is still forwarded. Free or enlarge the volume that holds it",
        )

    def _once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            with contextlib.suppress(RuntimeError):
                self._on_trouble(message)
