"""Replacement of a silent node, member or coordinator, within its lease and one second.

The seed draws the worst case: the moment of the silence between two keep-alives, two heartbeats and
two lease checks of etcd, the message delays, and peers that hang or abort.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.world import Result

SEEDS = range(40)
SILENT_AT = 6.0
ROUND_SECONDS = 0.15
"""Maximum seconds for the messages of one round, some of them slow."""


def plan(seed: int, lease_seconds: float, victim: int, fault: str) -> Plan:
    at = SILENT_AT + 2.0 * seed / len(SEEDS)
    return Plan(
        profile="silent",
        bounds=RendezvousParams(3, 4, keep_alive_seconds=lease_seconds, last_call_seconds=1.0),
        arrivals=(0.1, 0.2, 0.3, 0.4),
        operator=False,
        replaces=False,
        launcher=seed % 3 > 0,
        hang_share=float(seed % 2),
        actions=(Action(at, fault, victim, 60.0),),
        quiet_at=at + 2 * lease_seconds + 5.0,
    )


def seconds_until_three_train(result: Result) -> float:
    """Return the seconds from the silence to the last start of workers of the next round."""
    began = result.plan.actions[0].at
    starts: dict[int, list[float]] = defaultdict(list)
    for at, _, what, number in result.trace:
        if what == "starts workers of" and isinstance(number, int) and at > began:
            starts[number].append(at)
    whole = [max(times) for times in starts.values() if len(times) == 3]
    assert whole, report(result)
    return min(whole) - began


@pytest.mark.parametrize("victim", [0, 2], ids=["coordinator", "member"])
@pytest.mark.parametrize("fault", ["power_off", "freeze", "cut_off"])
@pytest.mark.parametrize("lease_seconds", [3.0, 5.0])
def test_silent_node_is_replaced_in_time(lease_seconds: float, fault: str, victim: int) -> None:
    for seed in SEEDS:
        result = simulate(seed, plan=plan(seed, lease_seconds, victim, fault))
        assert result.violation is None, report(result)
        seconds = seconds_until_three_train(result)
        assert seconds < lease_seconds + 1.0 + ROUND_SECONDS, f"{seconds}\n{report(result)}"
