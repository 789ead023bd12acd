"""When a member turns to its coordinator: links to it, and watches its key. Pure.

A thousand members must do neither in the very moment in which it forms a round.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.alarm import Alarm

ATTEND_SECONDS = 1.0
WATCH_LEADER_SECONDS = 0.2
"""About how long after the round's end, or a change of coordinator, its key is watched: each
member begins at its own time, for many at once would keep the last ones from their round."""


@dataclass(slots=True)
class Attendance:
    """`found_at`: when we learnt who coordinates; `sealed_at`: when we saw the last round final."""

    jitter: float
    found_at: float = 0.0
    sealed_at: float = 0.0

    def may_link(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Whether it is time to link to the coordinator: the round is `final`, or late."""
        return final or alarm.passed(self.found_at + ATTEND_SECONDS, now)

    def may_watch(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Whether it is time to watch the coordinator's key: what happens before is not missed."""
        if not self.may_link(final, now, alarm):
            return False
        if not final:
            return True
        delay_seconds = WATCH_LEADER_SECONDS * (0.5 + self.jitter)
        return alarm.passed(max(self.found_at, self.sealed_at) + delay_seconds, now)
