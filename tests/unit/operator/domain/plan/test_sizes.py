"""Legal sizes, and the clamping of the wanted size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_operator.domain.plan.sizes import (
    Clamp,
    WantedSize,
    legal_sizes,
    wanted_size,
)
from tests.unit.operator.builders import job


@pytest.mark.parametrize(
    ("low", "high", "step", "sizes"),
    [
        (1, 4, 1, [1, 2, 3, 4]),
        (2, 9, 4, [2, 6]),
        (2, 10, 4, [2, 6, 10]),
        (3, 3, 1, [3]),
        (3, 5, 9, [3]),
    ],
)
def test_legal_sizes(low: int, high: int, step: int, sizes: list[int]) -> None:
    spec = job(minNodes=low, maxNodes=high, nodeIncrement=step).spec
    assert list(legal_sizes(spec)) == sizes


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, WantedSize(6, 9)),
        (0, WantedSize(2, 0, Clamp.BELOW_MIN_NODES)),
        (1, WantedSize(2, 1, Clamp.BELOW_MIN_NODES)),
        (2, WantedSize(2, 2)),
        (5, WantedSize(2, 5, Clamp.BETWEEN_INCREMENTS)),
        (6, WantedSize(6, 6)),
        (9, WantedSize(6, 9, Clamp.BETWEEN_INCREMENTS)),
        (10, WantedSize(6, 10, Clamp.ABOVE_MAX_NODES)),
    ],
)
def test_wanted_size_is_clamped_with_a_reason(asked: int | None, wanted: WantedSize) -> None:
    assert wanted_size(job(minNodes=2, maxNodes=9, nodeIncrement=4, nodes=asked).spec) == wanted


@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 60), st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_wanted_size_is_nearest_legal_size_below(
    low: int, more: int, step: int, asked: int
) -> None:
    spec = job(minNodes=low, maxNodes=low + more, nodeIncrement=step, nodes=asked).spec
    sizes = list(legal_sizes(spec))
    wanted = wanted_size(spec)
    assert wanted.nodes == max((size for size in sizes if size <= asked), default=low)
    assert (wanted.clamp is None) == (asked in sizes)
