"""Whether the attached agent still speaks: one that hangs is none.

An agent says every second that it lives, from the loop that obeys the rendezvous. One that is
attached and has fallen silent (stopped, or stuck) can end no workers, so for other nodes, and for
what becomes of the workers, it counts as lost. An agent that never said so is an older one.
"""

from __future__ import annotations

import time

SILENT_SECONDS = 3.0


class Attendance:
    """Of the agent that attached last."""

    def __init__(self) -> None:
        self._attached = False
        self._heard: float | None = None

    def attached(self) -> None:
        self._attached = True
        self._heard = None

    def heard(self) -> None:
        """It said that it lives."""
        self._heard = time.monotonic()

    def left(self) -> None:
        self._attached = False

    @property
    def present(self) -> bool:
        if not self._attached or self._heard is None:
            return self._attached
        return time.monotonic() - self._heard < SILENT_SECONDS
