"""Healthy gang during every kind of etcd outage: no new round, however long the outage lasts.

The hardest outages end together with the leases: one member has lost its key when etcd is back, the
next has not, and a third only assumes so.
"""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.world import Result

SEEDS = range(40)
LEASE_SECONDS = 5.0
OUTAGE_AT = 30.0


def plan(seed: int, *actions: Action) -> Plan:
    """Return a plan of four nodes without pod faults."""
    return Plan(
        profile="outages",
        bounds=RendezvousParams(
            2,
            4,
            keep_alive_seconds=LEASE_SECONDS,
            last_call_seconds=1.0,
            stop_grace_seconds=0.5,
        ),
        arrivals=(0.1, 0.2, 0.3, 0.4),
        operator=False,
        replaces=False,
        launcher=seed % 3 > 0,
        hang_share=0.0,
        stubborn=0.0,
        actions=actions,
        quiet_at=OUTAGE_AT + 25.0,
    )


def stopped(result: Result) -> bool:
    """Return True if workers were started after the gang had formed."""
    assert result.violation is None, report(result)
    starts = [at for at, _, what, _ in result.trace if what == "starts workers of"]
    assert starts
    return max(starts) > OUTAGE_AT


@pytest.mark.parametrize("outage", ["cut_all_etcd", "restart_etcd"])
@pytest.mark.parametrize("seconds", [3.5, 4.5, 6.0, 12.0])
def test_etcd_outage_stops_no_complete_gang(seconds: float, outage: str) -> None:
    """Exception: a key expires just after etcd is back, before the coordinator is linked."""
    at = [OUTAGE_AT + 0.3 * (seed % 10) + 0.05 * (seed // 10) for seed in SEEDS]
    plans = [plan(seed, Action(at[seed], outage, 0, seconds)) for seed in SEEDS]
    count = sum(stopped(simulate(seed, plan=plans[seed])) for seed in SEEDS)
    assert count <= (1 if seconds < LEASE_SECONDS else 0)


@pytest.mark.parametrize("seconds", [1.5, 2.4])
def test_agent_suspended_during_an_outage_stops_no_complete_gang(seconds: float) -> None:
    for seed in SEEDS:
        stall = Action(OUTAGE_AT + 10.0 + 0.025 * seed, "stop_agent", seed % 4, seconds)
        away = Action(OUTAGE_AT, "cut_all_etcd", 0, 20.0)
        planned = plan(seed, away, stall)
        if not planned.launcher and seconds > 2.0:
            continue  # its launcher ends the workers of an agent that hangs
        result = simulate(seed, plan=planned)
        assert not stopped(result), report(result)
