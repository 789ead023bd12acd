"""First writes of a job: the bounds outside Kubernetes, and the first round."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.bootstrap import (
    LARGE_GANG,
    LARGE_GANG_SECONDS,
    open_first,
    write_bounds,
)
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate, Snapshot
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import MemberState, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.rendezvous.builders import KEYS, Job, identity

BOUNDS = RendezvousParams(min_nodes=2, max_nodes=2)


def snapshot(job: Job, bounds: RendezvousParams = BOUNDS) -> Snapshot:
    return Snapshot(job.view(), job.stored("a"), bounds, job.clock)


def opened(job: Job, **bounds: Any) -> RoundUpdate | None:
    job.coordinator.timers.begin_step(job.now)
    params = RendezvousParams(**{"min_nodes": 1, "max_nodes": 4, **bounds})
    return open_first(snapshot(job, params), job.coordinator)


def test_bounds_are_written_alone_beside_a_round() -> None:
    job = Job("a").brings(BOUNDS).round(1)
    act = write_bounds(snapshot(job), job.coordinator)
    own = job.stored("a")
    absent = Compare(KEYS.bounds, Target.CREATE, 0)
    assert act == RoundUpdate(
        Txn(
            (absent, Compare(own.key, Target.CREATE, own.created)),
            (Put(KEYS.bounds, encode(BOUNDS)),),
            (Range(KEYS.bounds),),
        ),
        "bounds written",
    )


@pytest.mark.parametrize(("known", "together"), [(0, True), (1, False)])
def test_first_round_is_written_with_the_bounds_if_no_round_was_seen(
    known: int, together: bool
) -> None:
    job = Job("a").brings(BOUNDS).change("a", known=known)
    act = write_bounds(snapshot(job), job.coordinator)
    assert act is not None
    puts = [op.key for op in act.txn.success if isinstance(op, Put)]
    assert puts == ([KEYS.round, KEYS.bounds] if together else [KEYS.bounds])
    assert Compare(KEYS.bounds, Target.CREATE, 0) in act.txn.compares


def test_bounds_of_another_member_are_not_overwritten() -> None:
    job = Job("a").brings(BOUNDS)
    act = write_bounds(snapshot(job), job.coordinator)
    assert act is not None
    job.bounds(min_nodes=3)
    assert not job.commit(act.txn).succeeded
    assert job.view().round is None


def test_timers_of_the_first_round_start_before_it_is_written() -> None:
    job = Job("a", "b")
    opened(job)
    for timer in (("state", 1, RoundState.JOINABLE), ("stopped", 1)):
        assert job.coordinator.timers.known(timer) == job.now


@pytest.mark.parametrize(
    ("bounds", "state", "note", "awaited"),
    [
        ({"max_nodes": 2}, RoundState.FROZEN, "round 1 opens, frozen with 2 members", 0),
        ({"max_nodes": 4}, RoundState.JOINABLE, "round 1 opens", 2),
        ({"min_nodes": 3, "max_nodes": 3}, RoundState.JOINABLE, "round 1 opens", 1),
    ],
)
def test_first_round_is_frozen_once_all_wanted_members_wait(
    bounds: dict[str, int], state: RoundState, note: str, awaited: int
) -> None:
    job = Job("a", "b")
    act = opened(job, **bounds)
    assert act is not None
    assert (act.note, job.coordinator.awaited) == (note, awaited)
    assert job.commit(act.txn).succeeded
    found = job.current()
    assert (found.number, found.state) == (1, state)
    frozen = (identity("a"), identity("b")) if state is RoundState.FROZEN else ()
    assert found.ids == frozen


def test_first_round_is_not_frozen_beside_running_workers() -> None:
    job = Job("a", "b", "c").change("c", state=MemberState.RUNNING)
    act = opened(job, min_nodes=2, max_nodes=2)
    assert act is not None
    assert (act.note, job.coordinator.awaited) == ("round 1 opens", 0)


@pytest.mark.parametrize(("least", "waits"), [(LARGE_GANG - 1, False), (LARGE_GANG, True)])
def test_members_of_a_large_job_get_a_moment_to_register(least: int, waits: bool) -> None:
    job = Job("a")
    assert (opened(job, min_nodes=least, max_nodes=LARGE_GANG) is None) is waits
    if waits:
        assert job.coordinator.timers.wake == job.now + LARGE_GANG_SECONDS
        assert (
            opened(job.later(LARGE_GANG_SECONDS), min_nodes=least, max_nodes=LARGE_GANG) is not None
        )
