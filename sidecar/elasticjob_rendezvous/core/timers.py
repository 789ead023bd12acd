"""The coordinator's stop watches: first sightings on its own monotonic clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timers:
    """When each thing was first seen, and when to look again.

    `since` starts a watch the first time it is asked; `until` also asks to be
    woken at its end. `forget` stops it.
    """

    now: float = 0.0
    wake: float | None = None
    _started: dict[object, float] = field(default_factory=dict)

    def begin_step(self, now: float) -> None:
        self.now = now
        self.wake = None

    def since(self, what: object) -> float:
        """When `what` was first seen: now, if it is new."""
        return self._started.setdefault(what, self.now)

    def known(self, what: object) -> float | None:
        return self._started.get(what)

    def start(self, what: object, at: float) -> None:
        self._started[what] = at

    def over(self, what: object, seconds: float) -> bool:
        """Whether `seconds` have passed since `what` was first seen; else wake then."""
        return self.passed(self.since(what) + seconds)

    def passed(self, at: float) -> bool:
        """Whether the time `at` has come; else wake then."""
        if self.now >= at:
            return True
        self.wake = at if self.wake is None else min(self.wake, at)
        return False

    def calm(self, what: object, count: int, quiet_seconds: float, most_seconds: float) -> bool:
        """Whether there have been this many for long enough, or any for the most; else wake then.

        Each count has its own watch: with every further one the quiet begins anew.
        """
        quiet_at = self.since((what, count)) + quiet_seconds
        return self.passed(min(quiet_at, self.since(what) + most_seconds))

    def forget(self, what: object) -> None:
        self._started.pop(what, None)

    def clear(self) -> None:
        self._started.clear()
