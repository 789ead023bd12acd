"""Output stream of a worker, from its pipe to the launcher's own stream and a log file.

Lines are forwarded whole and with a prefix. The end of standard error is kept, with the start
of a final traceback: the reason for the worker's exit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.output import LogTarget, Output

MAX_HELD_BYTES = 64 * 1024


class PrefixedLines:
    """Line buffer that holds back an unfinished line, so that lines of several workers do not mix.

    A line longer than 64 KiB is split into prefixed lines. Of a line overwritten with carriage
    returns, as progress bars do, only the last state is kept.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return the lines completed by `data`, ready to write."""
        end = data.rfind(b"\n")
        if end < 0:
            self._held += data
            return self.flush() if len(self._held) > MAX_HELD_BYTES else b""
        whole = self._held + data[:end]
        self._held = data[end + 1 :]
        return self._prefixed(whole)

    def flush(self) -> bytes:
        """Return the unfinished line as a line of its own."""
        if not self._held:
            return b""
        whole, self._held = self._held, b""
        return self._prefixed(whole)

    def _prefixed(self, whole: bytes) -> bytes:
        if b"\r" in whole:
            whole = b"\n".join(_last_state(line) for line in whole.split(b"\n"))
        return self._prefix + whole.replace(b"\n", b"\n" + self._prefix) + b"\n"


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


TAIL_BYTES = 16 * 1024
"""Maximum excerpt size: fits a traceback through a framework with that of its cause."""
EXCERPT_GAP = b"\n[...]\n"

_HEADER = b"Traceback (most recent call last):"
_RANK_PREFIX = re.compile(rb"(?m)^\[rank\d+\]: ?")


def error_excerpt(kept: bytes) -> bytes:
    """Return the end of `kept`, with the start of a final traceback if its message is longer.

    This requires that the message's further lines are indented: other lines may be a log that
    continues after a caught exception.
    """
    begin = kept.rfind(_HEADER)
    if len(kept) <= TAIL_BYTES or begin < 0 or begin >= len(kept) - TAIL_BYTES:
        return kept[-TAIL_BYTES:]
    lines = _RANK_PREFIX.sub(b"", kept[begin:]).split(b"\n")
    outer = [n for n, line in enumerate(lines) if n and line[:1].strip()]
    if len(outer) != 1:
        return kept[-TAIL_BYTES:]
    half = TAIL_BYTES // 2
    return kept[begin : begin + half] + EXCERPT_GAP + kept[-half:]


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
        return error_excerpt(self._tail).decode("utf-8", "replace")

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
