"""Standard output of a run, written by a thread: a terminal that accepts nothing blocks no loop."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from io import UnsupportedOperation
from typing import Any, TextIO

from elasticjob_cli.output import show_error

MOST_PENDING = 1 << 20
"""Pending characters from which on the screen is congested for log lines."""


class Screen:
    """Wrapper of `file` that queues text for a thread, and drops text the file refuses.

    `gone` is True once its reader has closed it; `file` then writes to the null device. The queue
    is unbounded: a caller that writes at its own pace asks `busy` or `congested` first.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._pending: deque[str] = deque()
        self._characters = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.gone = False

    @property
    def busy(self) -> bool:
        """True while text waits to be written."""
        return bool(self._characters)

    @property
    def congested(self) -> bool:
        """True while much text waits to be written."""
        return self._characters > MOST_PENDING

    def write(self, text: str) -> int:
        if text and not self.gone:
            with self._changed:
                self._pending.append(text)
                self._characters += len(text)
                self._changed.notify_all()
            if self._thread is None:  # daemon: it may be blocked in a write when the run ends
                self._thread = threading.Thread(target=self._write_all, daemon=True)
                self._thread.start()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes at once; see `drain`."""

    def drain(self) -> None:
        """Wait until all text is written; a signal can end the wait."""
        with self._changed:
            self._changed.wait_for(lambda: not self._characters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending))
                text = self._pending.popleft()
            if not self.gone:
                self._write(text)
            with self._changed:
                self._characters -= len(text)
                self._changed.notify_all()

    def _write(self, text: str) -> None:
        try:
            self._file.flush()
            try:
                fd = self._file.fileno()
            except UnsupportedOperation:  # a text buffer
                self._file.write(text)
                return
            # Not through the file's buffer, whose lock a blocked write would hold at exit.
            left = text.encode(self._file.encoding, self._file.errors or "strict")
            while left:
                try:
                    left = left[os.write(fd, left) :]
                except BlockingIOError:  # another process made the terminal non-blocking
                    select.select([], [fd], [])
        except BrokenPipeError:
            self._lose()
        except (OSError, ValueError):
            pass  # a full disk may accept the next line

    def _lose(self) -> None:
        """Redirect buffered and later output to the null device, so that no write fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        self.gone = True
        with contextlib.suppress(OSError):
            show_error("elasticjob: the output was closed: stopping the job")
