"""Pure arithmetic on measurements: medians and ratios. What failed is None, never a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeVar

K = TypeVar("K")


def median_or_none(values: Sequence[float | None]) -> float | None:
    """The median; None where there is nothing to take it of, or where any of them failed."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return median(known)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the nearest ranks.

    Raises ValueError for an empty sequence or a percentage outside 0..100.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be between 0 and 100, not {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ratio(peer: float | None, ours: float | None) -> float | None:
    """How many times faster ours is; None where either has no number."""
    if peer is None or not ours:
        return None
    return round(peer / ours, 2)


def ratios(peer: Mapping[K, float | None], ours: Mapping[K, float | None]) -> dict[K, float | None]:
    """The ratio for every case that the peer was given."""
    return {case: ratio(value, ours.get(case)) for case, value in peer.items()}
