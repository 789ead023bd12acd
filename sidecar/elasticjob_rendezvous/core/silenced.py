"""Members that failed to confirm a frozen round, and the penalty during which they do not count.

No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.core.timers import Timers

FIRST_PENALTY_SECONDS = 15.0


@dataclass(slots=True)
class Silenced:
    """Penalty of each member; every failure to confirm doubles the next one."""

    _penalties: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Member -> number of failures, end of the penalty."""

    def silence(self, id: str, now: float) -> None:
        times = self._penalties.get(id, (0, 0.0))[0]
        self._penalties[id] = (times + 1, now + FIRST_PENALTY_SECONDS * 2**times)

    def ids(self, timers: Timers) -> set[str]:
        """Return the members that do not count now; the timers wake when a penalty ends."""
        return {id for id, (_, until) in self._penalties.items() if not timers.passed(until)}
