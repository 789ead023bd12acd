"""Processes forked from one parent that has imported everything, released at the same time.

Owns their lifetime and two pipes: the end of file on one is the start signal, on the other all
report, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.processes import die_with_parent

Send = Callable[[object], None]
"""Reporter of one line of less than 4 KiB, so that lines of different processes do not mix."""
Live = Callable[[int, Callable[[], None], Send], object]
"""Main function of a process; gets its index, a wait for the start signal, and the reporter. Its
result is kept until the process is killed: a handler may serve others."""


class CaseFailed(Exception):
    """Case in which not all members got a rank in time; the text gives the reason."""


class Forked:
    """Processes of one `forked` block."""

    def __init__(self, report: int, start: int) -> None:
        self._report = report
        self._start = start
        self._rest = b""

    def release(self) -> float:
        """Send the start signal to all at once; return its monotonic time."""
        began = time.monotonic()
        os.close(self._start)
        self._start = -1
        return began

    def take(self, count: int, deadline: float) -> list[dict[str, Any]]:
        """Return the next reports. Raises CaseFailed at the deadline or at the first error."""
        lines: list[dict[str, Any]] = []
        while len(lines) < count:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                lines.append(json.loads(line))
                if error := lines[-1].get("error"):  # the others may be waiting for this member
                    raise CaseFailed(error)
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._report], [], [], remaining)[0]:
                raise CaseFailed(f"only {len(lines)} of {count} members finished in time")
            self._rest += os.read(self._report, 65536)
        return lines

    def close(self) -> None:
        if self._start >= 0:
            self.release()


@contextlib.contextmanager
def forked(count: int, live: Live, log: Path) -> Iterator[Forked]:
    """Run `count` processes until the end of the block; their output goes to `log`."""
    start_read, start_write = os.pipe()
    report_read, report_write = os.pipe()
    pids: list[int] = []
    processes = Forked(report_read, start_write)
    try:
        for index in range(count):
            pid = os.fork()
            if pid == 0:
                os.close(start_write)
                _child(index, live, start_read, report_write, log)
            pids.append(pid)
        yield processes
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot have been reused
        for pid in pids:
            os.waitpid(pid, 0)
        processes.close()
        for descriptor in (start_read, report_read, report_write):
            os.close(descriptor)


def _child(index: int, live: Live, start: int, report: int, log: Path) -> None:
    """Run one forked process; never returns."""

    def send(outcome: object) -> None:
        os.write(report, json.dumps(outcome).encode() + b"\n")

    def wait_for_start() -> None:
        os.read(start, 1)

    kept: object = None
    with contextlib.suppress(BaseException):  # must not unwind into the parent's frames
        die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            kept = live(index, wait_for_start, send)
        except BaseException as error:
            send({"error": f"{type(error).__name__}: {error}"[:500]})
        signal.pause()  # stay until the case is over
        del kept
    os._exit(1)
