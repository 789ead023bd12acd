"""Earliest time at which a step has to run again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Alarm:
    """Earliest wake-up time requested during one step."""

    at: float | None = None

    def set(self, at: float | None) -> None:
        if at is not None:
            self.at = at if self.at is None else min(self.at, at)

    def passed(self, at: float, now: float) -> bool:
        """Return True if the time `at` has come; else request a wake-up then."""
        if now >= at:
            return True
        self.set(at)
        return False
