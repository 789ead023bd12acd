"""Number of requests per round, and of surplus members: bounded, and independent of N."""

from __future__ import annotations

import pytest

from elasticjob_operator.rendezvous.record_store import WRITE_BYTES, quota_of
from elasticjob_rendezvous.protocol.kv import KeyValue, Range, WatchBatch
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Plan
from tests.sim.run import simulate
from tests.sim.world import World

MOST_REQUESTS = 8


def gang(nodes: int, surplus: int = 0, **fields: object) -> Plan:
    """Return a plan without faults, all of whose members come at once."""
    bounds = RendezvousParams(nodes, nodes, last_call_seconds=2.0, keep_alive_seconds=5.0)
    return Plan(
        profile="requests",
        bounds=bounds,
        arrivals=(0.1,) * (nodes + surplus),
        quiet_at=1.0,
        **fields,  # type: ignore[arg-type]
    )


def requests(world: World) -> list[int]:
    return [pod.agent.wire.requests for pod in world.pods if pod.agent is not None]


@pytest.mark.parametrize("nodes", [4, 16, 64])
def test_first_round_needs_few_requests_per_member(nodes: int) -> None:
    result = simulate(1, plan=gang(nodes))
    assert result.violation is None
    assert result.world.checker.final_numbers == {1}
    counts = requests(result.world)
    assert len(counts) == nodes
    assert sum(counts) / nodes <= MOST_REQUESTS
    assert sorted(counts)[-2] <= MOST_REQUESTS  # every member but the coordinator


@pytest.mark.parametrize("nodes", [1, 4, 16, 64])
def test_round_writes_less_than_a_hundredth_of_the_quota(nodes: int) -> None:
    result = simulate(1, plan=gang(nodes))
    batches: list[WatchBatch] = []
    result.world.etcd.watch(Range("/", prefix=True), 1, batches.append)
    events = [event for batch in batches for event in batch.events]
    values = [event.value if isinstance(event, KeyValue) else b"" for event in events]
    written = sum(len(event.key) + WRITE_BYTES for event in events) + sum(map(len, values))
    assert nodes * 400 < written < quota_of(nodes).burst / 100


def test_running_round_needs_no_requests() -> None:
    plan = gang(4)
    short = simulate(1, plan=plan)
    counts = requests(short.world)
    short.world.run(short.world.now + 300.0)
    assert requests(short.world) == counts


def test_surplus_members_wait_and_trigger_nothing() -> None:
    result = simulate(2, plan=gang(4, surplus=3))
    assert result.violation is None
    assert result.world.checker.final_numbers == {1}
    result.world.run(result.world.now + 120.0)
    current = result.world.checker.round
    assert current is not None
    assert (current.number, current.state) == (1, RoundState.FINAL)
