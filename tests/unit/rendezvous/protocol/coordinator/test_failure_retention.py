"""Number of failures of one round in etcd: the sixteen nearest to the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.member_key import report
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.roster import RankAssignment
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.unit.rendezvous.builders import KEYS, Job, a_failure, identity


def told(job: Job, number: int = 1) -> set[str]:
    """Return the names of members whose failures of a round are in etcd."""
    return set(job.view().failures.get(number, {}))


def many(count: int, **bounds: Any) -> Job:
    """Return a job in final round 2; in round 1 b failed by itself, and `count` others too."""
    names = [f"m{index}" for index in range(count)]
    job = Job("a", "b", **bounds).sealed("a", "b", number=2, charged=(1,))
    job.failure("b", kind=FailureClass.USER_ERROR, at_ms=10**6)
    for name in names:
        job.failure(name, kind=FailureClass.PEER_ABORT)
    return job


def test_sixteen_failures_of_a_round_are_kept_including_the_first_failure() -> None:
    """The number of operations in a transaction is limited: the rest goes with the next one."""
    job = many(100)
    act = job.decide()
    assert act is not None
    assert "50 failures" in act.note
    assert job.commit(act.txn).succeeded
    job.act()
    assert len(told(job)) == failure_policy.KEPT_FAILURES
    assert identity("b") in told(job)
    job.idle()


def test_deposed_coordinator_deletes_no_failures() -> None:
    job = many(20)
    act = job.decide()
    assert act is not None
    job.gone("a")
    assert not job.commit(act.txn).succeeded
    assert len(told(job)) == 21


def test_surplus_failures_are_deleted_at_the_end_of_the_job() -> None:
    job = Job("a", "b", max_restarts=0).sealed("a", "b")
    for index in range(30):
        job.failure(f"m{index}", kind=FailureClass.PEER_ABORT)
    job.failure("b", kind=FailureClass.USER_ERROR)
    job.put(KEYS.roster(1), replace(job.roster(1), seats=seats_of(job, 30)))
    assert job.act().state is RoundState.CLOSED
    assert len(told(job)) == failure_policy.KEPT_FAILURES
    assert identity("b") in told(job)


def seats_of(job: Job, count: int) -> tuple[RankAssignment, ...]:
    """Return the seats of a and b, and of `count` others."""
    seats = job.roster(1).seats
    more = (f"m{index}" for index in range(count))
    return (*seats, *(seats[0]._replace(id=identity(name), name=name) for name in more))


def test_redundant_failure_is_not_recorded() -> None:
    job = Job("a", "b").sealed("a", "b")
    for index in range(failure_policy.KEPT_FAILURES):
        job.failure(f"m{index}", kind=FailureClass.PEER_ABORT)
    stored = job.stored("b")
    for kind, is_kept in ((FailureClass.PEER_ABORT, False), (FailureClass.USER_ERROR, True)):
        local = Local(ready=True, round=1, failure=a_failure("b", kind=kind))
        assert (report(job.own("b", local=local), stored) is not None) is is_kept
