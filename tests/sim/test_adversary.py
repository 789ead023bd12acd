"""Adversary on the links: it keeps no fenced worker running and changes no cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_launcher import proof
from elasticjob_launcher.proof import Exchange, Message, Role
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim import schedule
from tests.sim.network.adversary import ATTACK
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.world import Result

SEEDS = range(6)
FORGING_SECONDS = 4.9
KINDS = ("partition", "churn", "pause", "rack", "one-way", "outlived", "storm")


def attacked(plan: Plan, *attacks: Action) -> Plan:
    return replace(plan, actions=tuple(sorted(plan.actions + attacks, key=lambda each: each.at)))


def isolated(seed: int, lease_seconds: float) -> Plan:
    """Return a plan that cuts one of three nodes off from etcd and the others, under attack."""
    cut = Action(5.0 + seed % 7 / 10, "cut_off", seed, 20.0)
    bounds = RendezvousParams(
        1, 3, keep_alive_seconds=lease_seconds, last_call_seconds=1.0, stop_grace_seconds=0.5
    )
    plan = Plan(
        profile="cut off",
        bounds=bounds,
        arrivals=(0.1, 0.2, 0.3),
        operator=False,
        replaces=False,
        hang_share=1.0,
        actions=(cut,),
        quiet_at=28.0,
    )
    return attacked(plan, Action(4.0, ATTACK, 0, 30.0))


def unbroken(result: Result) -> Result:
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)
    return result


def causes(result: Result) -> list[tuple[float, str, str, object]]:
    """Return every event and effect of the agents, without the lines about the attack."""
    return [line for line in result.trace if line[2] != ATTACK]


@pytest.mark.parametrize("kind", KINDS)
def test_forged_links_change_nothing_in_a_run(kind: str) -> None:
    """Every event, decision and cause is that of the same run without the adversary."""
    for seed in SEEDS[:3]:
        plan = schedule.plan(seed, kind)
        calm = simulate(seed, plan=plan)
        times = [0.5 + 4.5 * number for number in range(8)]
        attacks = [Action(at, ATTACK, 0, FORGING_SECONDS) for at in times if at < plan.quiet_at]
        result = simulate(seed, plan=attacked(plan, *attacks))
        assert result.world.adversary.present
        assert result.world.adversary.accepted == 0
        assert causes(result) == causes(calm), seed


@pytest.mark.parametrize("kind", KINDS)
def test_lines_written_into_links_break_no_invariant(kind: str) -> None:
    closed = 0
    for seed in SEEDS:
        plan = schedule.plan(seed, kind)
        result = unbroken(simulate(seed, plan=attacked(plan, Action(1.0, ATTACK, 0, 60.0))))
        assert result.world.adversary.accepted == 0
        closed += result.world.adversary.closed
    assert closed > len(SEEDS)


@pytest.mark.parametrize("lease_seconds", [2.0, 3.0, 5.0])
def test_fenced_workers_end_under_attack(lease_seconds: float) -> None:
    for seed in SEEDS:
        result = unbroken(simulate(seed, plan=isolated(seed, lease_seconds)))
        assert result.world.adversary.accepted == 0


@pytest.mark.parametrize(
    ("role", "invariant"),
    [(Role.LINK_QUESTION, "leaves are real"), (Role.LINK_ANSWER, "no two rounds write")],
)
def test_believed_forgeries_break_invariants(
    role: Role, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the proof of one side the same attacks succeed."""
    verify = proof.verify

    def believe(key: bytes, shown: Role, exchange: Exchange, said: Message, last: str = "") -> str:
        return str(said["mac"]) if shown is role else verify(key, shown, exchange, said, last)

    monkeypatch.setattr(proof, "verify", believe)
    results = [simulate(seed, plan=isolated(seed, 3.0)) for seed in SEEDS]
    assert all(result.world.adversary.accepted for result in results)
    found = {result.violation.invariant for result in results if result.violation is not None}
    assert found == {invariant}
