"""Delayed start of a member's link to the coordinator, and of the watch on its key. No I/O.

The delay keeps a thousand members from starting both at the moment the coordinator forms a round.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.alarm import Alarm

ATTEND_SECONDS = 1.0
WATCH_LEADER_SECONDS = 0.2
"""Approximate delay of the watch on the coordinator's key, from the moment the round is final or
the coordinator changes. Each member adds its own jitter: many watches at once would delay the
round of the last members."""


@dataclass(slots=True)
class Attendance:
    """Times that the delays count from.

    `found_at`: when the coordinator became known; `sealed_at`: when the last round was seen final.
    """

    jitter: float
    found_at: float = 0.0
    sealed_at: float = 0.0

    def may_link(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Return True if this member may link to the coordinator: the round is `final`, or late."""
        return final or alarm.passed(self.found_at + ATTEND_SECONDS, now)

    def may_watch(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Return True if this member may watch the coordinator's key; the delay loses no change."""
        if not self.may_link(final, now, alarm):
            return False
        if not final:
            return True
        delay_seconds = WATCH_LEADER_SECONDS * (0.5 + self.jitter)
        return alarm.passed(max(self.found_at, self.sealed_at) + delay_seconds, now)
