"""Unreadable record in place of the coordinator's: the next member coordinates."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.kv import Put, Txn
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.plan import Plan
from tests.sim.processes.operator import OPERATOR
from tests.sim.world import World

GARBAGE = (b"not JSON", b'{"id":"uid-9"}', b"[]")


def world(seed: int, garbage: int) -> World:
    """Return a world of three pods in which some keys below `members/` are older than theirs."""
    plan = Plan("malformed", RendezvousParams(2, 3), arrivals=(), operator=bool(seed % 2))
    found = World(seed, plan)
    for number in range(garbage):
        put = Put(found.keys.session(f"uid-9{number}", "s1"), GARBAGE[number % len(GARBAGE)])
        found.etcd.txn(Txn((), (put,)), OPERATOR)
    found.controller.start()
    for _ in range(3):
        found.add_pod()
    return found


@pytest.mark.parametrize("garbage", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_next_member_coordinates_and_logs_the_skipped_record(seed: int, garbage: int) -> None:
    job = world(seed, garbage)
    job.run(10.0)
    current = job.checker.round
    assert current is not None
    assert (current.number, current.state, current.nodes) == (1, RoundState.FINAL, 3)
    leader = next(pod for pod in job.pods if pod.id == current.coordinator)
    named = [
        note.text
        for _, who, _, note in job.trace
        if who == leader.name and isinstance(note, Note) and "record ignored" in note.text
    ]
    assert len(named) == garbage, named
    assert all(f"uid-9{number}/s1" in "\n".join(named) for number in range(garbage))


@pytest.mark.parametrize("seed", range(6))
def test_successor_skips_malformed_record_when_the_coordinator_goes(seed: int) -> None:
    job = world(seed, garbage=2)
    job.run(10.0)
    current = job.checker.round
    assert current is not None
    first = next(pod for pod in job.pods if pod.id == current.coordinator)
    first.die()
    job.run(20.0)
    current = job.checker.round
    assert current is not None
    assert (current.number, current.state, current.nodes) == (2, RoundState.FINAL, 2)
    assert current.coordinator != first.id


def test_coordinator_with_damaged_record_returns_and_next_member_coordinates() -> None:
    job = world(0, garbage=0)
    job.run(10.0)
    current = job.checker.round
    assert current is not None
    (spoiled,) = job.checker.sessions_of(current.coordinator)
    job.etcd.txn(Txn((), (Put(spoiled.key, GARBAGE[0], spoiled.lease),)), OPERATOR)
    job.run(40.0)
    after = job.checker.round
    assert after is not None
    assert (after.state, after.nodes) == (RoundState.FINAL, 3)
