"""Order of tests in which each of pytest's workers begins with long ones.

`--dist worksteal` gives each worker a contiguous share of the collected tests, and later the ends
of other shares to idle workers. Long tests at the end would leave processors idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Test = TypeVar("Test")


def long_first(
    tests: Sequence[Test],
    seconds: Callable[[Test], float],
    file: Callable[[Test], str],
    workers: int,
) -> list[Test]:
    """Return the tests in an order in which each worker's share begins with long ones.

    `seconds` returns 0 for a test that is not long. The long tests of a file stay together, so that
    one worker has its fixtures; each file goes to the worker with the least so far.
    """
    blocks: dict[str, list[Test]] = {}
    others: list[Test] = []
    for test in tests:
        (blocks.setdefault(file(test), []) if seconds(test) else others).append(test)

    def total(block: Sequence[Test]) -> float:
        return sum(map(seconds, block))

    shares: list[list[Test]] = [[] for _ in range(workers)]
    for block in sorted(blocks.values(), key=total, reverse=True):
        min(shares, key=total).extend(block)
    found: list[Test] = []
    for number, share in enumerate(shares):
        size = (len(tests) - len(found)) // (workers - number)
        own = max(size - len(share), 0)
        found += share + others[:own]
        del others[:own]
    return found + others
