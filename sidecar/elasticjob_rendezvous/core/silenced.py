"""Members that failed to confirm a frozen round, and for how long they do not count. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.core.timers import Timers

FIRST_PENALTY_SECONDS = 15.0


@dataclass(slots=True)
class Silenced:
    """How often each failed is kept, so that the next silence counts for longer."""

    _penalties: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Member -> how often it failed, until when it does not count."""

    def silence(self, id: str, now: float) -> None:
        times = self._penalties.get(id, (0, 0.0))[0]
        self._penalties[id] = (times + 1, now + FIRST_PENALTY_SECONDS * 2**times)

    def ids(self, timers: Timers) -> set[str]:
        """Who does not count now; the timers wake when one of them does again."""
        return {id for id, (_, until) in self._penalties.items() if not timers.passed(until)}
