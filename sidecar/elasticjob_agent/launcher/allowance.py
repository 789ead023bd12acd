"""Time and memory limits of the zygote while it imports.

The zygote runs the import code of arbitrary packages, whose duration and memory use are unbounded.
The launcher checks it from outside, a few times a second, only while it imports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from .loop import Loop, Timer
from .settings import Limits

LOOK_SECONDS = 0.25


class Allowance:
    """Time and memory limits of one process, enforced from `begin` to `end`."""

    def __init__(self, loop: Loop, limits: Limits) -> None:
        self._loop = loop
        self._limits = limits
        self._timer: Timer | None = None
        self._pid = 0
        self._module = ""

    def begin(self, pid: int, doing: str, exceeded: Callable[[str, bool], None]) -> None:
        """Call `exceeded` once if a limit is exceeded while the process is `doing` something.

        The arguments are the reason, and True if only the time limit was exceeded: another attempt
        may take less time.
        """
        self.end()
        self._pid, self._module = pid, ""
        until = time.monotonic() + self._limits.seconds

        def look() -> None:
            left = until - time.monotonic()
            large = self.too_large()
            if large:
                exceeded(large, False)
            elif left <= 0:
                seconds = f"{self._limits.seconds:g} s"
                exceeded(f"{doing} took longer than {seconds}{self._where()}", True)
            else:
                self._timer = self._loop.call_later(min(LOOK_SECONDS, left), look)

        look()

    def imports(self, module: str) -> None:
        """Record the module being imported, to name it if a limit is exceeded."""
        self._module = module

    def too_large(self) -> str:
        """Return the reason if the memory limit is exceeded; empty otherwise."""
        if _resident_bytes(self._pid) <= self._limits.most_bytes:
            return ""
        return f"the standby grew over {self._limits.most_bytes >> 20} MiB{self._where()}"

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _where(self) -> str:
        return f", importing {self._module}" if self._module else ""


def _resident_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0
