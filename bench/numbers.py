"""Pure arithmetic on measurements: medians and ratios. What failed is None, never a number."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def median_or_none(values: Sequence[float | None]) -> float | None:
    """The median; None where there is nothing to take it of, or where any of them failed."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return median(known)


def ratio(peer: float | None, ours: float | None) -> float | None:
    """How many times faster ours is; None where either has no number."""
    if peer is None or not ours:
        return None
    return round(peer / ours, 2)
