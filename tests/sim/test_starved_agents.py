"""Agents without processor time: members that are cut off in each round before its first step.

The agent of one pod is suspended for longer than its lease after each start of its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from elasticjob_rendezvous.protocol.coordinator import crash_loop
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.invariants.crash_loop import Crashing
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.world import Result

SECONDS = 120.0
SEEDS = range(3)


def plan(seed: int, least: int, *actions: Action) -> Plan:
    bounds = RendezvousParams(
        least, 3, keep_alive_seconds=3.0, last_call_seconds=1.0, settle_seconds=0.3
    )
    return Plan(
        profile="starved",
        bounds=bounds,
        arrivals=(0.1, 0.2, 0.3),
        operator=False,
        launcher=seed % 2 > 0,
        hang_share=float(seed % 3 > 0),
        stubborn=0.0,
        actions=actions,
        quiet_at=SECONDS,
    )


def starved(seed: int, least: int) -> Result:
    result = simulate(seed, plan=plan(seed, least, Action(3.0, "starve", 2, SECONDS)))
    assert result.violation is None, report(result)
    return result


@contextmanager
def without_back_off() -> Iterator[None]:
    """Remove the rule, and the invariant that ends a run at its first violation."""
    with (
        patch.object(crash_loop, "held_back", lambda *_: frozenset()),
        patch.object(Crashing, "_check_cuts", lambda *_: None),
    ):
        yield


def rounds(result: Result) -> int:
    """Return the number of rounds until the agent got its processor time back."""
    sealed = result.world.checker.sealed_at
    return sum(at < SECONDS for at in sealed.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_gang_that_needs_a_starved_member_starts_less_and_less_often(seed: int) -> None:
    """Without the rule the workers of all nodes start anew every few seconds, without end."""
    result = starved(seed, least=3)
    with without_back_off():
        endless = simulate(seed, plan=result.plan)
    assert rounds(endless) >= 15
    assert rounds(result) <= 10, report(result)
    last = result.world.checker.round
    assert last is not None
    assert last.cause.kind is CauseKind.LOSS
    assert "cut off before the first step" in last.cause.detail


@pytest.mark.parametrize("seed", SEEDS)
def test_gang_that_can_train_without_a_starved_member_does(seed: int) -> None:
    """Return of the member ends no round of the others before its back-off is over."""
    result = starved(seed, least=2)
    checker = result.world.checker
    lives = [
        checker.reopened_at.get(number, SECONDS) - at
        for number, at in checker.sealed_at.items()
        if at < SECONDS and len(checker.sealed[number].seats) == 2
    ]
    assert max(lives) > 7.0, report(result)


@pytest.mark.parametrize("seed", SEEDS)
def test_wave_of_lost_nodes_has_no_back_off(seed: int) -> None:
    """Each node that goes is replaced; none of the rounds has made a step."""
    actions = [Action(3.0 + 6.0 * each, "power_off", each) for each in range(5)]
    result = simulate(seed, plan=plan(seed, 3, *actions))
    assert result.violation is None, report(result)
    current = result.world.checker.round
    assert current is not None
    assert (current.counts.losses, current.streak.cuts) == (5, 0)
