"""Token bucket for rate limits. No I/O; times are the caller's clock, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Bucket of `size` tokens, full at first, that gains one token in `refill_seconds`."""

    size: int
    refill_seconds: float
    _full_at: float = -math.inf

    @property
    def available_at(self) -> float:
        """Time from which on a token is available."""
        return self._full_at - (self.size - 1) * self.refill_seconds

    def take(self, now: float) -> bool:
        """Take a token; return False if there is none."""
        if self.available_at > now:
            return False
        self._full_at = max(self._full_at, now) + self.refill_seconds
        return True

    def is_full(self, now: float) -> bool:
        return self._full_at <= now
