"""Order of tests for several workers: long ones first in each share, and none lost."""

from __future__ import annotations

import random

import pytest

from tests.distribution import long_first

Test = tuple[str, int, float]
"""File, number and seconds of a test; 0 if it is not long."""


def order(tests: list[Test], workers: int) -> list[Test]:
    return long_first(tests, lambda test: test[2], lambda test: test[0], workers)


def shares(tests: list[Test], workers: int) -> list[list[Test]]:
    """Return the contiguous shares that `--dist worksteal` gives to its workers at first."""
    found, left = [], list(tests)
    for number in range(workers):
        size = len(left) // (workers - number)
        found.append(left[:size])
        left = left[size:]
    return found


def test_every_share_begins_with_whole_files_of_long_tests() -> None:
    short = [(f"short{n // 10}", n, 0.0) for n in range(100)]
    long = [(f"long{n // 2}", n, 300.0 + n) for n in range(8)]
    found = shares(order(short + long, 4), 4)
    assert [[test[0] for test in share[:3]] for share in found] == [
        ["long3", "long3", "short0"],
        ["long2", "long2", "short2"],
        ["long1", "long1", "short5"],
        ["long0", "long0", "short7"],
    ]


def test_files_are_dealt_by_their_total() -> None:
    tests = [("a", 0, 900.0), ("b", 0, 300.0), ("c", 0, 300.0), ("d", 0, 300.0)]
    short = [("e", n, 0.0) for n in range(20)]
    found = shares(order(short + tests, 2), 2)
    assert [test[0] for test in found[0] if test[2]] == ["a"]
    assert [test[0] for test in found[1] if test[2]] == ["b", "c", "d"]


@pytest.mark.parametrize("seed", range(20))
def test_no_test_is_lost_and_others_keep_their_order(seed: int) -> None:
    dice = random.Random(seed)
    tests = [
        (f"file{dice.randrange(9)}", n, dice.choice([0.0, 0.0, 0.0, 300.0, 600.0]))
        for n in range(dice.randrange(60))
    ]
    found = order(tests, dice.randrange(1, 7))
    assert sorted(found) == sorted(tests)
    assert [test for test in found if not test[2]] == [test for test in tests if not test[2]]
