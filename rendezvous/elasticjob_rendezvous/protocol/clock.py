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
    """First sightings, and the next wake-up time.

    `since` starts a stopwatch at its first call; `over` also requests a wake-up at its end.
    `forget` stops it.
    """

    now: float = 0.0
    wake: float | None = None
    _started: dict[object, float] = field(default_factory=dict)

    def begin_step(self, now: float) -> None:
        self.now = now
        self.wake = None

    def since(self, what: object) -> float:
        """Return the time at which `what` was first seen: now, if it is new."""
        return self._started.setdefault(what, self.now)

    def known(self, what: object) -> float | None:
        return self._started.get(what)

    def start(self, what: object, at: float) -> None:
        self._started[what] = at

    def over(self, what: object, seconds: float) -> bool:
        """Return True `seconds` after `what` was first seen; else request a wake-up then."""
        return self.passed(self.since(what) + seconds)

    def passed(self, at: float) -> bool:
        """Return True if the time `at` has come; else request a wake-up then."""
        if self.now >= at:
            return True
        self.wake = at if self.wake is None else min(self.wake, at)
        return False

    def calm(self, what: object, count: int, quiet_seconds: float, most_seconds: float) -> bool:
        """Return True if `count` has held for the quiet time, or any count for the maximum time.

        Else request a wake-up then. Each count has its own stopwatch: a new one restarts the quiet
        time.
        """
        quiet_at = self.since((what, count)) + quiet_seconds
        return self.passed(min(quiet_at, self.since(what) + most_seconds))

    def forget(self, what: object) -> None:
        self._started.pop(what, None)

    def clear(self) -> None:
        self._started.clear()
