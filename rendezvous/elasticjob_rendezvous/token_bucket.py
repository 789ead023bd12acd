"""Token bucket for rate limits. No I/O; times are the caller's clock, in seconds."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


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

    def take(self, now: float, tokens: int = 1) -> bool:
        """Take tokens, at most `size`; return False and take none if there are not as many."""
        full_at = max(self._full_at, now)
        if full_at - (self.size - tokens) * self.refill_seconds > now:
            return False
        self._full_at = full_at + tokens * self.refill_seconds
        return True

    def is_full(self, now: float) -> bool:
        return self._full_at <= now


class TokenBuckets(Generic[Key]):
    """Token bucket of each key, all of one size. Full ones are dropped, longest unused first."""

    def __init__(self, size: int, refill_seconds: float) -> None:
        self._size, self._refill_seconds = size, refill_seconds
        self._buckets: OrderedDict[Key, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Key, now: float) -> TokenBucket:
        """Return the bucket of a key; its size may be changed."""
        bucket = self._buckets.setdefault(key, TokenBucket(self._size, self._refill_seconds))
        self._buckets.move_to_end(key)
        while len(self._buckets) > 1 and next(iter(self._buckets.values())).is_full(now):
            self._buckets.popitem(last=False)
        return bucket

    def forget(self, key: Key) -> None:
        """Begin with a full bucket again."""
        self._buckets.pop(key, None)
