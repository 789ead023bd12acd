"""Replacement of a member that is killed while a round forms, before or after it linked."""

from __future__ import annotations

from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.test_silent_nodes import seconds_until_three_train

SEEDS = range(100)
FIRST_KILL, LAST_KILL = 0.66, 0.72
"""Times of the faults, shortly before and after the first round is final and members link."""
LEASE_SECONDS = 30.0
NOTICED_SECONDS = 6.0
"""Limit for the probes of unlinked members, or the confirmation of a frozen round; the lease takes
far longer."""


def plan(seed: int) -> Plan:
    at = FIRST_KILL + (LAST_KILL - FIRST_KILL) * seed / len(SEEDS)
    return Plan(
        profile="early",
        bounds=RendezvousParams(3, 4, keep_alive_seconds=LEASE_SECONDS, last_call_seconds=1.0),
        arrivals=(0.1, 0.15, 0.2, 0.25),
        operator=False,
        replaces=False,
        launcher=seed % 2 > 0,
        actions=(Action(at, "crash", 1 + seed % 3, 0.0),),
        quiet_at=at + LEASE_SECONDS,
    )


def test_member_killed_while_its_round_forms_is_replaced_long_before_its_lease_ends() -> None:
    for seed in SEEDS:
        result = simulate(seed, plan=plan(seed))
        assert result.violation is None, report(result)
        seconds = seconds_until_three_train(result)
        assert seconds < NOTICED_SECONDS, f"{seconds}\n{report(result)}"
