"""Since when a member leaves, and how long it waits for others meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.alarm import Alarm

PATIENCE_SECONDS = 3.0
"""How long a member that leaves waits for etcd to take its key; then the lease will."""
SEEN_SECONDS = 2.0
"""How long it keeps its key for a coordinator to read that it leaves."""


@dataclass(slots=True)
class Departure:
    """`since`: when we first knew that we leave; `idle_since`: when no worker ran any more."""

    since: float | None = None
    idle_since: float | None = None

    def tell(self, leaving: bool, idle: bool, now: float) -> None:
        """Note whether we leave; a mark may be withdrawn before we have gone."""
        if not leaving:
            self.since = self.idle_since = None
            return
        self.since = now if self.since is None else self.since
        if idle:
            self.idle_since = now if self.idle_since is None else self.idle_since

    def was_seen(self, now: float, alarm: Alarm) -> bool:
        """Whether the round need not be kept waiting for to learn that we left.

        Until it moves on our key stays, for whoever coordinates by then to read why.
        """
        return self.since is None or alarm.passed(self.since + SEEN_SECONDS, now)

    def gave_up(self, now: float, alarm: Alarm) -> bool:
        """We leave, our workers have stopped, and etcd does not answer."""
        return self.idle_since is not None and alarm.passed(self.idle_since + PATIENCE_SECONDS, now)
