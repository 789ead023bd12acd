"""Start of a member's leave, and its timeouts. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.alarm import Alarm

PATIENCE_SECONDS = 3.0
"""Maximum time that a leaving member waits for etcd to delete its key; then the lease expires."""
SEEN_SECONDS = 2.0
"""Time that a leaving member keeps its key for a coordinator to read the leave."""


@dataclass(slots=True)
class Departure:
    """Times of a leave.

    `since`: when the leave became known here; `idle_since`: when no worker ran any more.
    """

    since: float | None = None
    idle_since: float | None = None

    def tell(self, leaving: bool, idle: bool, now: float) -> None:
        """Note whether this member leaves; a drain request may be withdrawn before it is gone."""
        if not leaving:
            self.since = self.idle_since = None
            return
        self.since = now if self.since is None else self.since
        if idle:
            self.idle_since = now if self.idle_since is None else self.idle_since

    def was_seen(self, now: float, alarm: Alarm) -> bool:
        """Return True if the key is no longer needed to announce the leave.

        Until the round moves on the key stays, for its coordinator to read the reason.
        """
        return self.since is None or alarm.passed(self.since + SEEN_SECONDS, now)

    def gave_up(self, now: float, alarm: Alarm) -> bool:
        """Return True if the member leaves, its workers have stopped, and etcd does not answer."""
        return self.idle_since is not None and alarm.passed(self.idle_since + PATIENCE_SECONDS, now)
