"""When a step wants to be called again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Alarm:
    """The earliest time that anybody asked for during one step."""

    at: float | None = None

    def set(self, at: float | None) -> None:
        if at is not None:
            self.at = at if self.at is None else min(self.at, at)

    def passed(self, at: float, now: float) -> bool:
        """Whether the time `at` has come; else be called then."""
        if now >= at:
            return True
        self.set(at)
        return False
