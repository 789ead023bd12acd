"""Suspensions among faults: the job is closed in time, after its checkpoint where it can save.

A quarter of `SIM_SEEDS` is the number of seeds (default 200 / 4), `SIM_FIRST` the first one, as in
`test_random_schedules`.
"""

from __future__ import annotations

import os

import pytest

from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveResult
from tests.sim import schedule
from tests.sim.run import report, simulate

CHUNK = 25
FIRST = int(os.environ.get("SIM_FIRST", "0"))
SEEDS = int(os.environ.get("SIM_SEEDS", "200")) // 4


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_stop_among_faults_ends_in_time(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FIRST + SEEDS)):
        result = simulate(seed, plan=schedule.stopping(seed))
        if result.violation is not None:
            pytest.fail(report(result), pytrace=False)


def test_late_save_request_gets_its_whole_time() -> None:
    """etcd refuses writes for five seconds from the moment that the stop is asked for."""
    result = simulate(2274, plan=schedule.stopping(2274, "refusing"))
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)


def test_stops_of_the_schedules_have_every_result() -> None:
    found: set[str] = set()
    for seed in range(500):
        if found == set(SaveResult):
            return
        closed = simulate(seed, plan=schedule.stopping(seed)).world.checker.closed
        outcome = None if closed is None else closed.outcome
        if outcome is not None and outcome.save is not None:
            found.add(outcome.save.kind)
    raise AssertionError(f"only {found}")
