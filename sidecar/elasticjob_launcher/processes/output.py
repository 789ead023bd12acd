"""Workers' output to the launcher's own streams and to size-limited log files.

A worker must never wait for a slow reader or a slow or full disk. A separate thread for each
stream, and one for all log files, writes from a bounded queue; output that does not fit is
dropped, and a note replaces it.

A log keeps its beginning and its end. `<name>` is the current file. At a third of the limit it
is renamed, at the end of a line: the first time to `<name>.head`, which stays, later to
`<name>.1`, replacing the previous one.
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

TERMINATION_MESSAGE_BYTES = 4096


def write_termination_message(path: str, message: str, details: str = "") -> None:
    """Write the message of the container's end, with the last details for which there is room.

    Only the kubelet creates the file; without it nothing is written.
    """
    text = message.encode(errors="replace")[:TERMINATION_MESSAGE_BYTES]
    room = TERMINATION_MESSAGE_BYTES - len(text) - 2
    if details and room > 0:
        text += b": " + details.encode(errors="replace")[-room:]
    with contextlib.suppress(OSError):
        if Path(path).exists():
            Path(path).write_bytes(text)


class BoundedLog:
    """Log of at most `max_bytes` in all files.

    OSErrors propagate; lost bytes are counted and noted in the file once writing works again.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._segment_bytes = max(1, max_bytes // 3)
        self._fd: int | None = None
        self._size = 0
        self._lost_bytes = 0

    def write(self, data: bytes) -> None:
        written = 0
        try:
            self._open()
            if self._lost_bytes:
                self._append(b"\n[elasticjob] %d bytes are missing here\n" % self._lost_bytes)
                self._lost_bytes = 0
            while written < len(data):
                written += self._append_some(data[written:])
        except OSError:
            self._lost_bytes += len(data) - written
            raise

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
            with contextlib.suppress(OSError):  # the agent reads it, and the umask is the workers'
                os.fchmod(self._fd, 0o644)
            self._size = os.fstat(self._fd).st_size

    def _append_some(self, data: bytes) -> int:
        """Write data that fits in the current file, up to a line's end; return its length."""
        room = self._segment_bytes - self._size
        if len(data) <= room:
            return self._append(data)
        cut = data.rfind(b"\n", 0, max(0, room)) + 1
        if cut == 0 and self._size == 0:
            cut = room  # a single line longer than the file limit
        written = self._append(data[:cut]) if cut else 0
        if written == cut:
            self._rotate()
        return written

    def _append(self, data: bytes) -> int:
        """Write once and return the length, which may be short if the disk fills up."""
        assert self._fd is not None
        count = os.write(self._fd, data)
        self._size += count
        return count

    def _rotate(self) -> None:
        self.close()
        head = self._path.with_name(self._path.name + ".head")
        older = self._path.with_name(self._path.name + ".1")
        self._path.replace(older if head.exists() else head)
        self._size = 0
        self._open()


QUEUE_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 128
"""Overhead of a queued piece besides its content: a worker may write a few bytes at a time."""


class Target:
    """Output destination; `write` and `close` run on the writer's thread."""

    lost_bytes = 0  # dropped because the queue was full; maintained by the queue's owner

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class StreamTarget(Target):
    """Launcher's standard output or error; possibly shared, so its flags stay unchanged."""

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
                self._broken = True  # the reader is gone for good
                raise

    def close(self) -> None:
        """Do nothing: the launcher does not own the stream."""


class LogTarget(Target):
    """Log file of a worker."""

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
    """Thread that writes queued data in order; `put` and `close` never block."""

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
            self._append(target, _loss_note(target) + data)

    def close(self, target: Target) -> None:
        """Close the target once all data queued before is written."""
        with self._changed:
            self._append(target, _loss_note(target))
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
                # Removed only after the write, so that flush waits for this piece too.
                self._queue.popleft()
                self._queued_bytes -= _cost(data)
                self._changed.notify_all()


def _cost(data: bytes | None) -> int:
    return len(data or b"") + PIECE_BYTES


def _loss_note(target: Target) -> bytes:
    """Return a note on the data dropped since the last note; empty if none was dropped."""
    lost_bytes, target.lost_bytes = target.lost_bytes, 0
    if not lost_bytes:
        return b""
    return b"[elasticjob] %d bytes left out: the reader or the disk is too slow\n" % lost_bytes


class Output:
    """Launcher's two streams and all log files; each kind of error is reported once."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self._reported: set[str] = set()
        self._streams = (StreamTarget(1), StreamTarget(2))
        self._stream_writers = (
            Writer("stdout", lambda error: self._stream_trouble("standard output", error)),
            Writer("stderr", lambda error: self._stream_trouble("standard error", error)),
        )
        self._log_writer = Writer("logs", self._log_trouble)

    def forward(self, stream: int, data: bytes) -> None:
        """Write to the launcher's standard output (1) or error (2)."""
        self._stream_writers[stream - 1].put(self._streams[stream - 1], data)

    def write_line(self, text: str) -> None:
        """Write a line of the launcher's own to standard error."""
        self.forward(2, f"[elasticjob] {text}\n".encode(errors="replace"))

    def log(self, target: LogTarget, data: bytes) -> None:
        self._log_writer.put(target, data)

    def close_log(self, target: LogTarget) -> None:
        self._log_writer.close(target)

    def flush(self, within_seconds: float) -> None:
        """Write the queued data; data that a reader or disk does not accept in time is lost."""
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
        if kind not in self._reported:
            self._reported.add(kind)
            with contextlib.suppress(RuntimeError):
                self._on_trouble(message)
