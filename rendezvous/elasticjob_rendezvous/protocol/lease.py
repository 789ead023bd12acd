"""Lease of this member: its certain validity, and its renewal. No I/O.

Deadlines count from the local time at which a request was sent, so that this member always gives
up before etcd does.
"""

from __future__ import annotations

from dataclasses import dataclass

OVERDUE_SECONDS = 1.0
"""Maximum pause between two renewals once an answer is overdue. Each attempt shows if etcd is down
for all members: workers without peers continue only while that is certain (`self_fencing`),
independent of the duration of the lease."""


@dataclass(slots=True)
class Lease:
    """Lease to which this member's key is attached; `id` 0 means no lease."""

    id: int = 0
    deadline: float = 0.0
    ttl_seconds: int = 0
    renew_at: float = 0.0

    def holds(self, now: float) -> bool:
        return bool(self.id) and now < self.deadline

    def grant(self, id: int, deadline: float, now: float) -> None:
        self.id = id
        self.deadline = deadline
        self.renew_at = now + self._renew_every(now)

    def keep(self, deadline: float) -> None:
        self.deadline = max(self.deadline, deadline)

    def forget(self) -> None:
        """Drop a lease that etcd no longer knows; `deadline` stays: it ends the last safe time."""
        self.id = 0

    def due(self, now: float) -> bool:
        """Return True if a renewal is due now, and set the time of the next one."""
        if not self.id or now < self.renew_at:
            return False
        self.renew_at = now + self._renew_every(now)
        return True

    def _renew_every(self, now: float) -> float:
        """Return the renewal interval: a third of the lease, half that or less once overdue."""
        if self.deadline - now < self.ttl_seconds / 2:
            return min(self.ttl_seconds / 6, OVERDUE_SECONDS)
        return self.ttl_seconds / 3
