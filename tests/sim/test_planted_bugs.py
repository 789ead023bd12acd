"""Planted bugs: the simulation finds each one; without the bug the same seed is clean."""

from __future__ import annotations

import pytest

from tests.sim import schedule
from tests.sim.planted_bugs.catalog import BUGS, Bug
from tests.sim.run import simulate

MOST_SEEDS = 2_000


def test_planted_bug_catalogue_is_large_and_unique() -> None:
    assert len(BUGS) >= 60
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug, pytestconfig: pytest.Config) -> None:
    """The last successful seed is tried first: the search may take hundreds of seeds."""
    cache: pytest.Cache | None = pytestconfig.cache
    key = f"planted-bugs/{bug.name}"
    last = (None if cache is None else cache.get(key, None), bug.seed)
    seeds = range(MOST_SEEDS)
    for seed in sorted(seeds, key=lambda seed: seed not in last):
        plan = schedule.plan(seed, bug.profile)
        with bug.plant() as engine:
            violation = simulate(seed, engine, plan).violation
        if violation is not None and simulate(seed, plan=plan).violation is None:
            if cache is not None:
                cache.set(key, seed)
            return
    pytest.fail(f"{bug.name} was not found in {MOST_SEEDS} runs of the kind {bug.profile}")
