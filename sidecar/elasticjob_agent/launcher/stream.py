"""Output stream of a worker, from its pipe to the launcher's own stream and a log file."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from . import lastwords
from .lines import PrefixedLines
from .loop import Loop, Timer
from .output import LogTarget, Output

READ_BYTES = 256 * 1024
SET_PIPE_SIZE = 1031  # fcntl.F_SETPIPE_SZ, named only from Python 3.10 on
PIPE_BYTES = 1024 * 1024
DUMP_BYTES = 64 * 1024  # the stacks of all threads, and the names of extension modules
HELD_LINE_SECONDS = 1.0


class WorkerStream:
    """Reader of a worker's pipe; `tail` is the end of the output, as text.

    `number` selects the destination: standard output (1), standard error (2) or none (0).

    An unfinished line is forwarded after one second, so that the last output of a hanging worker
    is visible.
    """

    def __init__(
        self,
        loop: Loop,
        output: Output,
        read_fd: int,
        number: int,
        prefix: bytes,
        log_path: Path | None,
        max_log_bytes: int,
    ) -> None:
        self._loop = loop
        self._output = output
        self._fd: int | None = read_fd
        self._number = number
        self._lines = PrefixedLines(prefix)
        self._log = LogTarget(log_path, max_log_bytes) if log_path is not None else None
        self._held_timer: Timer | None = None
        self._tail = b""
        os.set_blocking(read_fd, False)
        with contextlib.suppress(OSError):  # over the user's limit: the default size suffices
            fcntl.fcntl(read_fd, SET_PIPE_SIZE, PIPE_BYTES)
        loop.watch(read_fd, self._readable)
        if self._log is not None:
            output.log(self._log, b"")  # the file exists even if nothing is ever written

    @property
    def tail(self) -> str:
        return lastwords.telling(self._tail).decode("utf-8", "replace")

    @property
    def long_tail(self) -> str:
        """Longer end of the output, large enough for a stack dump."""
        return self._tail.decode("utf-8", "replace")

    def drain(self) -> None:
        """Read the pipe's current content; bounded, in case a process writes without end."""
        taken = 0
        while self._fd is not None and taken < 2 * PIPE_BYTES:
            count = self._readable()
            if not count:
                break
            taken += count

    def close(self) -> None:
        self._forward(self._lines.flush())
        if self._fd is not None:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = None
        if self._log is not None:
            self._output.close_log(self._log)
            self._log = None
        if self._held_timer is not None:
            self._held_timer.cancel()

    def _readable(self) -> int:
        if self._fd is None:
            return 0
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        self._take(data)
        return len(data)

    def _take(self, data: bytes) -> None:
        self._tail = (self._tail + data[-DUMP_BYTES:])[-DUMP_BYTES:]
        if self._log is not None:
            self._output.log(self._log, data)
        self._forward(self._lines.feed(data))
        if b"\n" in data and self._held_timer is not None:
            self._held_timer.cancel()
            self._held_timer = None
        if self._lines.holds and self._held_timer is None:
            self._held_timer = self._loop.call_later(HELD_LINE_SECONDS, self._held_too_long)

    def _held_too_long(self) -> None:
        self._held_timer = None
        self._forward(self._lines.flush())

    def _forward(self, block: bytes) -> None:
        if block and self._number:
            self._output.forward(self._number, block)
