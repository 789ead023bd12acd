"""Arithmetic on measurements: medians and ratios. A failed measurement is None. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def median_or_none(values: Sequence[float | None]) -> float | None:
    """Return the median; None without values, or if any of them failed."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return median(known)


def ratio(peer: float | None, ours: float | None) -> float | None:
    """Return the speed-up of ours; None if either has no number."""
    if peer is None or not ours:
        return None
    return round(peer / ours, 2)
