"""Nodes that are cut off while their agents die or hang: no two rounds run side by side.

The launcher cannot be probed then. It only has the last deadline from its agent.
"""

from __future__ import annotations

from random import Random

import pytest

from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Plan
from tests.sim.processes.pod import Pod
from tests.sim.run import report, simulate

SEEDS = range(35)
CUT_AT = 6.0
CUTS = ("cut_off", "cut_off", "cut_etcd", "cut_peers")
AWAY_SECONDS = (0.05, 1.0, 4.0, 60.0, 60.0)


def plan(seed: int, lease_seconds: float, launcher: bool) -> Plan:
    """Return a plan that cuts off one or two of four nodes and ends or hangs their agents."""
    rng = Random(f"cut off {seed} {lease_seconds} {launcher}")
    victims = rng.sample(range(4), rng.choice((1, 1, 2)))
    cut, begin = rng.choice(CUTS), CUT_AT + 2.0 * rng.random()
    seconds = rng.choice((lease_seconds, 14.0, 14.0))
    actions = []
    for victim in victims:
        actions.append(Action(begin + 0.2 * rng.random(), cut, victim, seconds))
        at = begin + (lease_seconds + 2.0) * rng.random()
        fault = rng.choice(("kill_agent", "stop_agent")) if launcher else "stop_agent"
        actions.append(Action(at, fault, victim, rng.choice(AWAY_SECONDS)))
    return Plan(
        profile="cut off",
        bounds=RendezvousParams(
            1, 4, keep_alive_seconds=lease_seconds, last_call_seconds=1.0, stop_grace_seconds=0.5
        ),
        arrivals=(0.1, 0.2, 0.3, 0.4),
        operator=False,
        replaces=False,
        launcher=launcher,
        hang_share=rng.choice((0.0, 1.0, 1.0)),
        slow_seconds=rng.choice((0.05, 0.5)),
        actions=tuple(sorted(actions, key=lambda action: action.at)),
        quiet_at=begin + 16.0,
    )


@pytest.mark.parametrize("launcher", [True, False], ids=["pod", "own child"])
@pytest.mark.parametrize("lease_seconds", [2.0, 3.0, 5.0])
def test_no_round_begins_beside_workers_of_a_node_that_was_cut_off(
    lease_seconds: float, launcher: bool
) -> None:
    for seed in SEEDS:
        result = simulate(seed, plan=plan(seed, lease_seconds, launcher))
        if result.violation is not None:
            pytest.fail(report(result), pytrace=False)


def test_without_launcher_deadline_rounds_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the deadline the same schedules violate the invariant."""
    monkeypatch.setattr(Pod, "_watch_deadline", lambda pod: None)
    results = [simulate(seed, plan=plan(seed, 3.0, launcher=False)) for seed in SEEDS]
    found = [result.violation.invariant for result in results if result.violation is not None]
    assert found.count("no two rounds write") >= len(SEEDS) // 4
