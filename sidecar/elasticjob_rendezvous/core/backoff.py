"""How long a member waits before it asks an etcd that did not serve it again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.1
LAST_SECONDS = 2.0


@dataclass(slots=True)
class Backoff:
    """Twice as long after each failure, until etcd answers. `jitter` is of 0 to 1.

    `until` is when the next request may be sent.
    """

    jitter: float
    until: float = 0.0
    _seconds: float = FIRST_SECONDS

    @property
    def pause_seconds(self) -> float:
        return self._seconds * (0.5 + self.jitter / 2)

    def failed(self, now: float) -> None:
        self.until = now + self.pause_seconds
        self.lengthen()

    def lengthen(self) -> None:
        """The next pause is longer, though nothing waits for this one."""
        self._seconds = min(self._seconds * 2, LAST_SECONDS)

    def answered(self) -> None:
        self._seconds = FIRST_SECONDS
        self.until = 0.0
