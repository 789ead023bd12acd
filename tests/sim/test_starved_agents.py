"""Agents without processor time: their gang does not re-form again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elasticjob_rendezvous.protocol.coordinator import repeated_losses
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import TRAINED_SECONDS
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.records.members import CauseKind, Round, RoundState
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim import schedule
from tests.sim.invariants import repeated_losses as checks
from tests.sim.processes.pod import Pod
from tests.sim.run import report, simulate
from tests.sim.test_necessary_rules import LEASE_SECONDS, causes, gang, leader
from tests.sim.world import World

SEEDS = range(12)
STARVED_SECONDS = LEASE_SECONDS + 2.5
BUSY_SECONDS = 150.0
GAPS = {"min_nodes": 2, "increment": 2}
Victim = Callable[[World], Pod]


def member(world: World) -> Pod:
    return next(pod for pod in world.pods if pod is not leader(world))


def starve(seed: int, fault: str, victim: Victim, nodes: int = 3, **fields: Any) -> World:
    """Take the processor from one agent for more than a lease, each time its workers run."""
    world = gang(seed, nodes, Engine, **fields)
    pod = victim(world)
    end = world.now + BUSY_SECONDS
    while world.now < end:
        if pod.phase is Workers.RUNNING and not pod.frozen:
            world.run(world.now + 1.0)
            getattr(world.faults, fault)(pod, STARVED_SECONDS)
            world.run(world.now + STARVED_SECONDS)
        else:
            world.run(world.now + 0.1)
    return world


def starve_before_seals(seed: int, victim: Victim) -> World:
    """Take the processor from one agent whenever a round has opened for it."""
    world = gang(seed, 3, Engine)
    pod = victim(world)
    end = world.now + BUSY_SECONDS
    world.faults.stop_agent(pod, 2 * STARVED_SECONDS)
    while world.now < end:
        cause = current(world).cause
        opened = current(world).state is RoundState.JOINABLE and cause.kind is CauseKind.JOIN
        if opened and pod.name in cause.members and not pod.frozen:
            world.faults.stop_agent(pod, STARVED_SECONDS)
            world.run(world.now + STARVED_SECONDS)
        else:
            world.run(world.now + 0.02)
    return world


def current(world: World) -> Round:
    assert world.checker.round is not None
    return world.checker.round


@pytest.mark.parametrize("fault", ["stop_agent", "freeze"])
@pytest.mark.parametrize("victim", [member, leader])
def test_rounds_of_a_gang_with_a_starved_agent_are_bounded(fault: str, victim: Victim) -> None:
    """The delay doubles: in this time it is reached after seven losses."""
    kinds = causes(starve(0, fault, victim))
    assert set(kinds) <= {CauseKind.LOSS, CauseKind.JOIN}
    assert len(kinds) <= 14
    with (
        patch.object(repeated_losses, "held_back", lambda *_: frozenset()),
        patch.object(checks, "check", lambda *_: None),
    ):
        without = causes(starve(0, fault, victim))
    assert len(without) > 2 * len(kinds)


@pytest.mark.parametrize("victim", [member, leader])
def test_rounds_of_a_gang_with_a_node_increment_are_bounded(victim: Victim) -> None:
    """A round of two leaves the fourth node idle; it waits for the starved one, for some time."""
    kinds = causes(starve(0, "stop_agent", victim, 4, **GAPS))
    assert set(kinds) <= {CauseKind.LOSS, CauseKind.JOIN}
    assert len(kinds) <= 14
    with (
        patch.object(repeated_losses, "LONGEST_SHARED_DELAY_SECONDS", 0.0),
        patch.object(checks, "check", lambda *_: None),
    ):
        without = causes(starve(0, "stop_agent", victim, 4, **GAPS))
    assert len(without) > 2 * len(kinds)


@pytest.mark.parametrize("victim", [member, leader])
def test_rounds_that_open_for_a_starved_agent_are_bounded(victim: Victim) -> None:
    """It is lost again before each of them is sealed, so no roster names it."""
    kinds = causes(starve_before_seals(0, victim))
    assert kinds[0] is CauseKind.LOSS
    assert set(kinds[1:]) == {CauseKind.JOIN}
    assert len(kinds) <= 8
    with patch.object(repeated_losses, "at_seal", lambda _, current, *__: current.losses):
        without = causes(starve_before_seals(0, victim))
    assert len(without) > 2 * len(kinds)


@pytest.mark.parametrize("increment", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_starved_agents_break_no_invariant(seed: int, increment: int) -> None:
    plan = schedule.plan(seed, "starved")
    plan = replace(plan, bounds=replace(plan.bounds, increment=increment))
    result = simulate(seed, plan=plan)
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)


def test_member_that_trains_again_is_no_longer_counted_as_lost() -> None:
    world = starve(1, "stop_agent", member)
    (row,) = current(world).losses
    assert row.times > 2
    pod = next(pod for pod in world.pods if pod.id == row.member)
    while pod.phase is not Workers.RUNNING:
        world.run(world.now + 1.0)
    number = current(world).number
    world.run(world.now + TRAINED_SECONDS + 1.0)
    assert (current(world).number, current(world).losses) == (number, ())
