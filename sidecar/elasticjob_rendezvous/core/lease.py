"""Our lease: until when it certainly holds, and when to renew it. Pure.

Deadlines count from the local time at which a request was sent, so that we always
give up before etcd does.
"""

from __future__ import annotations

from dataclasses import dataclass

OVERDUE_SECONDS = 1.0
"""The longest pause between two attempts once an answer is overdue. Each of them finds out whether
etcd is down for everybody, and workers without peers run on no longer than that is known for sure
(`safety`), however long the lease is."""


@dataclass(slots=True)
class Lease:
    """The lease on which our key hangs; `id` 0 is none."""

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
        """Etcd no longer knows it; `deadline` stays: it is when we were last safe."""
        self.id = 0

    def due(self, now: float) -> bool:
        """Whether to renew now; if so the next renewal is set."""
        if not self.id or now < self.renew_at:
            return False
        self.renew_at = now + self._renew_every(now)
        return True

    def _renew_every(self, now: float) -> float:
        """A third of the lease; twice as often or more once an answer is overdue."""
        if self.deadline - now < self.ttl_seconds / 2:
            return min(self.ttl_seconds / 6, OVERDUE_SECONDS)
        return self.ttl_seconds / 3
