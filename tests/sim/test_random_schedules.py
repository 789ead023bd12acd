"""Random schedules: every invariant holds on every seed.

`SIM_SEEDS` is the number of seeds (default 200), `SIM_FIRST` the first one. Seeds come in chunks,
so that pytest-xdist spreads them.
"""

from __future__ import annotations

import os

import pytest

from tests.sim import schedule
from tests.sim.run import report, simulate
from tests.sim.schedule import BY_NAME

CHUNK = 25
FIRST = int(os.environ.get("SIM_FIRST", "0"))
SEEDS = int(os.environ.get("SIM_SEEDS", "200"))
SHARE = 16
"""As many kinds of runs share the other seeds."""


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_invariant_holds(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        result = simulate(seed)
        if result.violation is not None:
            pytest.fail(report(result), pytrace=False)


@pytest.mark.parametrize("kind", sorted(BY_NAME))
@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS // SHARE, CHUNK))
def test_every_invariant_holds_in_other_kinds_of_runs(first: int, kind: str) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS // SHARE)):
        result = simulate(seed, plan=schedule.plan(seed, kind))
        if result.violation is not None:
            pytest.fail(report(result), pytrace=False)
