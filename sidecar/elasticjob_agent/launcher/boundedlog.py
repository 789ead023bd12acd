"""Size-limited log file that keeps the beginning and the end of a stream.

`<name>` is the current file. At a third of the limit it is renamed, at the end of a line: the
first time to `<name>.head`, which stays, later to `<name>.1`, replacing the previous one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
