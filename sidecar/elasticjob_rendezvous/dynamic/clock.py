"""Sources of time and randomness for the handler; tests inject their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and randomness: `monotonic` in seconds, `utc` with time zone, `chance` from 0 to 1."""

    monotonic: Callable[[], float] = time.monotonic
    utc: Callable[[], datetime] = _utc
    chance: Callable[[], float] = random.random
