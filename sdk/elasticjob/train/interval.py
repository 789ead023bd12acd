"""Interval between two snapshots in steps: given, from seconds, or from their measured cost.

The caller passes the times, all of them seconds of the same clock. No I/O.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any

from elasticjob.train.agreement import steps_between, steps_within

MAX_SECONDS = 86400
COSTS = 5
"""Number of measured costs, of which the median counts. The first ones include the allocation of
the buffers."""


def at_least_one(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def seconds_within_a_day(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a duration above 0 and of at most a day."""
    if not 0 < value <= MAX_SECONDS:
        raise ValueError(f"{name} must be above 0 and at most {MAX_SECONDS}, got {value!r}")


class Interval:
    """Interval that one rank proposes; the ranks take the longest proposal.

    Args:
        every_steps: constant number of steps.
        every_seconds: alternatively the approximate time.
        max_overhead: without either, the largest share of the training time.

    Raises:
        ValueError: an argument is out of range, or both intervals are given.
    """

    def __init__(
        self, every_steps: int | None, every_seconds: float | None, max_overhead: float
    ) -> None:
        if every_steps is not None and every_seconds is not None:
            raise ValueError("give every_steps or every_seconds, not both")
        if every_steps is not None:
            at_least_one("every_steps", every_steps)
        if every_seconds is not None:
            seconds_within_a_day("every_seconds", every_seconds)
        if not 0 < max_overhead <= 1:
            raise ValueError(f"max_overhead must be above 0 and at most 1, got {max_overhead!r}")
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._max_overhead = max_overhead
        self._costs: collections.deque[float] = collections.deque(maxlen=COSTS)
        self._step = 0
        self._began = 0.0

    @property
    def is_measured(self) -> bool:
        """True if the ranks may propose different numbers."""
        return self._every_steps is None

    @property
    def first(self) -> int:
        """Steps until the first snapshot of a round."""
        return self._every_steps or 1

    def start(self, step: int, now: float) -> None:
        """Begin to measure, after a restore."""
        self._step, self._began = step, now
        self._costs.clear()

    def proposed(self, step: int, now: float, cost: float | None) -> int:
        """Return the steps until the snapshot after this one.

        Args:
            cost: seconds that the last snapshot took from the training; None before the first.
        """
        steps, seconds = step - self._step, now - self._began
        self._step, self._began = step, now
        if self._every_steps is not None:
            return self._every_steps
        if self._every_seconds is not None:
            return steps_between(self._every_seconds, steps, seconds)
        if cost is not None:
            self._costs.append(cost)
        if cost is None or len(self._costs) < COSTS or steps < 1:
            return 1
        step_seconds = max(0.0, seconds - cost) / steps
        return steps_within(self._max_overhead, statistics.median(self._costs), step_seconds)
