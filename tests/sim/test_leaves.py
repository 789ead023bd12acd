"""Leaves during an etcd outage: a leaver counts as left, not as lost.

Otherwise the others would wait for its key; here the leave notice on its links must suffice.
Simulated at many moments of an outage, for coordinators and other members.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Round, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Action, Plan
from tests.sim.run import report, simulate
from tests.sim.world import Result, World

SEEDS = range(40)
OUTAGE_AT = 6.0
LEAVES = frozenset({CauseKind.LEAVE, CauseKind.PREEMPTION})


def plan(seed: int, outage: str, seconds: float, victims: tuple[int, ...]) -> Plan:
    """Return a plan of four nodes, some of which are drained and gone before the outage ends."""
    drained_at = OUTAGE_AT + 0.1 + 2.0 * seed / len(SEEDS)
    actions = [Action(OUTAGE_AT, outage, 0, seconds)]
    actions += [Action(drained_at + 0.4 * i, "drain", who) for i, who in enumerate(victims)]
    return Plan(
        profile="leaves",
        bounds=RendezvousParams(
            2, 4, keep_alive_seconds=5.0, last_call_seconds=1.0, stop_grace_seconds=0.5
        ),
        arrivals=(0.1, 0.2, 0.3, 0.4),
        operator=False,
        replaces=False,
        launcher=seed % 3 > 0,
        hang_share=float(seed % 2),
        stubborn=0.0,
        actions=tuple(actions),
        quiet_at=OUTAGE_AT + seconds + 2.0,
    )


def causes(result: Result) -> list[Cause]:
    """Return the last written cause of each round after the first."""
    key = result.world.keys.round
    found: dict[int, Cause] = {}
    for _, who, _, detail in result.trace:
        for change in detail if who == "etcd" and isinstance(detail, tuple) else ():
            if change.key == key and change.after is not None:
                record = decode(Round, key, change.after.value)
                found[record.number] = record.cause
    return [cause for number, cause in found.items() if number > 1]


@pytest.mark.parametrize(
    "victims", [(2,), (0,), (2, 0), (0, 0)], ids=["member", "coordinator", "both", "successor too"]
)
@pytest.mark.parametrize("outage", ["cut_all_etcd", "restart_etcd"])
@pytest.mark.parametrize("seconds", [6.0, 12.0])
def test_leave_during_an_etcd_outage_is_no_loss(
    seconds: float, outage: str, victims: tuple[int, ...]
) -> None:
    for seed in SEEDS:
        result = simulate(seed, plan=plan(seed, outage, seconds, victims))
        assert result.violation is None, report(result)
        left = {pod.name for pod in result.world.pods if pod.leaving}
        told = causes(result)
        lost = {name for cause in told if cause.kind is CauseKind.LOSS for name in cause.members}
        named = {name for cause in told if cause.kind in LEAVES for name in cause.members}
        assert len(left) == len(victims), report(result)
        assert not lost, f"{told}\n{report(result)}"
        assert named == left, f"{told}\n{report(result)}"


@pytest.mark.parametrize("seed", range(8))
def test_member_whose_drain_request_is_withdrawn_stays(seed: int) -> None:
    """The workers still stop for the leave: the member joins the next round, and none is lost."""
    slow = replace(plan(seed, "elect", 0.0, ()), operator=True, actions=(), stubborn=1.0)
    planned = replace(slow, bounds=replace(slow.bounds, stop_grace_seconds=2.0))
    world = World(seed, planned)
    world.controller.start()
    for _ in range(4):
        world.add_pod()
    world.run(OUTAGE_AT)
    pod = world.pods[seed % 4]
    world.truth.leaves(pod)
    world.controller.mark(pod, "scaled down")
    while world.checker.highest < 2:
        world.run(world.now + 0.001)
    world.controller.change(marks=())
    world.run(OUTAGE_AT + 12.0)
    current = world.checker.round
    assert current is not None
    assert pod.workers_alive
    assert (current.state, current.nodes) == (RoundState.FINAL, 4)
    assert current.counts.losses == 0
