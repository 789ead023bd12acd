"""Back-off between requests to an etcd that did not serve one. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.1
LAST_SECONDS = 2.0


@dataclass(slots=True)
class Backoff:
    """Exponential back-off that ends with etcd's next answer. `jitter` is in [0, 1).

    `until` is the earliest time of the next request.
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
        """Double the next pause, without starting one now."""
        self._seconds = min(self._seconds * 2, LAST_SECONDS)

    def answered(self) -> None:
        self._seconds = FIRST_SECONDS
        self.until = 0.0
