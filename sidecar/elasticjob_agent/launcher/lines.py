"""Conversion of a worker's byte stream into whole prefixed lines. No I/O."""

from __future__ import annotations

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
