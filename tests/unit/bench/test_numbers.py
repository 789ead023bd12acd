"""Medians and ratios; a failure never becomes a number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.numbers import median_or_none, ratio


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 1.0, 2.0], 2.0),
        ([4.0, 1.0], 2.5),
        ([7.0], 7.0),
        ([], None),
        ([1.0, None, 3.0], None),
        ([None], None),
    ],
)
def test_median_or_none(values: Sequence[float | None], expected: float | None) -> None:
    assert median_or_none(values) == expected


@pytest.mark.parametrize(
    ("peer", "ours", "expected"),
    [
        (10.0, 2.0, 5.0),
        (1.0, 3.0, 0.33),
        (None, 2.0, None),
        (10.0, None, None),
        (10.0, 0.0, None),
        (None, None, None),
    ],
)
def test_ratio(peer: float | None, ours: float | None, expected: float | None) -> None:
    assert ratio(peer, ours) == expected
