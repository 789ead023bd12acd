"""Deadlines of one member: the next wake-up time, and stopwatches on its own clock. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Timers:
    """Stopwatches by key, and the next wake-up time requested during one step.

    `since` starts a stopwatch at its first call; `over` also requests a wake-up at its end.
    `forget` stops it.
    """

    now: float = 0.0
    wake: float | None = None
    _started: dict[object, float] = field(default_factory=dict)

    def begin_step(self, now: float) -> None:
        self.now = now
        self.wake = None

    def since(self, key: object) -> float:
        """Return the time at which `key` was first seen: now, if it is new."""
        return self._started.setdefault(key, self.now)

    def known(self, key: object) -> float | None:
        """Return the time at which `key` was first seen; None if it was not."""
        return self._started.get(key)

    def start(self, key: object, at: float) -> None:
        self._started[key] = at

    def over(self, key: object, seconds: float) -> bool:
        """Return True `seconds` after `key` was first seen; else request a wake-up then."""
        return self.passed(self.since(key) + seconds)

    def passed(self, at: float) -> bool:
        """Return True if the time `at` has come; else request a wake-up then."""
        if self.now >= at:
            return True
        self.wake = at if self.wake is None else min(self.wake, at)
        return False

    def settled(self, key: object, count: int, quiet_seconds: float, most_seconds: float) -> bool:
        """Return True if `count` has not changed for the quiet time, or the maximum time is over.

        Otherwise request a wake-up for that time. Each count has its own stopwatch, so a new count
        restarts the quiet time; the maximum time runs from the first call for `key`.
        """
        quiet_at = self.since((key, count)) + quiet_seconds
        return self.passed(min(quiet_at, self.since(key) + most_seconds))

    def forget(self, key: object) -> None:
        self._started.pop(key, None)

    def clear(self) -> None:
        self._started.clear()
