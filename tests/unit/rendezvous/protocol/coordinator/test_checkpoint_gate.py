"""Coordinator's actions before the planned end of a round, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import UNHURRIED_SECONDS, before_end
from elasticjob_rendezvous.protocol.coordinator.round_end import RoundEnd
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    Round,
    RoundState,
    Save,
)
from tests.unit.rendezvous.builders import Job

LEAVE = Cause(CauseKind.LEAVE, ("b",), "evicted")
LEAVING = RoundEnd(cause=LEAVE, symptom=1.0)
JOINING = RoundEnd(cause=Cause(CauseKind.JOIN, ("z",)))
NOTHING = RoundEnd()


class Gang:
    """Final round whose members all want to save; `b` is about to leave."""

    def __init__(self, **bounds: Any) -> None:
        self.job = Job(*"abc", **{"max_nodes": 8, "leave_seconds": 30.0, **bounds})
        self.job.sealed(*"abc")
        self.timers = Timers()
        self.timers.begin_step(self.job.now)
        self.save: Save | None = None
        for name in "abc":
            self.job.change(name, saves=True, round=1, state=MemberState.RUNNING)
        self.job.change("b", state=MemberState.LEAVING)

    def due(
        self, look: RoundEnd = LEAVING, after: float = 0.0, *, ends_job: bool = False
    ) -> Save | RoundEnd | None:
        job = self.job.later(after)
        self.timers.begin_step(job.now)
        current = Round(1, RoundState.FINAL, Cause(CauseKind.START), save=self.save)
        view = job.view()
        assert view.bounds is not None
        found = before_end(
            view, job.roster(1), current, view.bounds.record, look, self.timers, ends_job=ends_job
        )
        if isinstance(found, Save):
            self.save = found
        return found

    def answered(self, *passed: int) -> Gang:
        for name, places in zip("abc", passed, strict=True):
            self.job.change(name, passed=places)
        return self


def test_gang_gets_save_request_then_save_step_then_stop() -> None:
    gang = Gang()
    assert gang.due() == Save(LEAVE, 25.0)
    assert gang.due() is None
    gang.answered(7, 9, -1)
    assert gang.due() is None, "one has not answered"
    gang.answered(7, 9, 8)
    assert gang.due() == Save(LEAVE, 25.0, point=10)
    for name in "ab":
        gang.job.change(name, saved=True)
    assert gang.due() is None
    gang.job.change("c", saved=True)
    assert gang.due() == LEAVING


def test_planned_stop_waits_no_longer_once_the_save_of_every_member_failed() -> None:
    gang = Gang()
    gang.due()
    gang.answered(7, 9, 8)
    assert gang.due() == Save(LEAVE, 25.0, point=10)
    for name in "abc":
        assert gang.due() is None
        gang.job.change(name, save_error="rank 1: /checkpoints: No space left on device")
    assert gang.due() == LEAVING


def test_one_completed_checkpoint_suffices() -> None:
    gang = Gang()
    gang.due()
    gang.answered(0, 0, 0).due()
    gang.job.change("a", completed=True)
    assert gang.due() == LEAVING


def test_wait_for_a_checkpoint_is_bounded_by_the_grace_of_the_leaving_member() -> None:
    gang = Gang()
    gang.due()
    assert gang.due(after=24.9) is None
    assert gang.timers.wake == pytest.approx(gang.job.now + 0.1)
    assert gang.due(after=0.2) == LEAVING


def test_time_of_a_save_request_counts_from_the_attempt_that_etcd_accepted() -> None:
    gang = Gang()
    gang.due()
    gang.save = None  # etcd refused the write
    assert gang.due(after=30.0) == Save(LEAVE, 25.0)
    assert gang.due(after=24.9) is None
    assert gang.due(after=0.2) == LEAVING


@pytest.mark.parametrize("kept", ["abc", "b"])
def test_gang_that_keeps_its_state_in_memory_is_asked_unless_the_job_ends(kept: str) -> None:
    gang = Gang()
    for name in kept:
        gang.job.change(name, saves=False, keeps=True)
    assert gang.due(ends_job=True) == LEAVING
    assert gang.due() == Save(LEAVE, 25.0)


@pytest.mark.parametrize(
    ("bounds", "change"),
    [
        ({"leave_seconds": 5.0}, {}),
        ({}, {"saves": False}),
        ({}, {"round": 0, "state": MemberState.WAITING}),
        ({}, {"state": MemberState.LEAVING, "stopped": True}),
        ({}, {"state": MemberState.STOPPING}),
    ],
    ids=["no time", "does not save", "not started", "stopped", "being stopped"],
)
def test_gang_that_cannot_save_gets_no_save_request(
    bounds: dict[str, Any], change: dict[str, Any]
) -> None:
    gang = Gang(**bounds)
    gang.job.change("c", **change)
    assert gang.due() == LEAVING


@pytest.mark.parametrize(("leave_seconds", "seconds"), [(5.5, 0.5), (6.0, 1.0)])
def test_minimum_grace_suffices_for_a_save_request(leave_seconds: float, seconds: float) -> None:
    assert Gang(leave_seconds=leave_seconds).due() == Save(LEAVE, seconds)


def test_incomplete_gang_gets_no_save_request() -> None:
    gang = Gang()
    gang.job.gone("b")
    assert gang.due() == LEAVING


@pytest.mark.parametrize(
    "cause",
    [
        Cause(CauseKind.LOSS, ("c",)),
        Cause(CauseKind.FAILURE, ("c",)),
        Cause(CauseKind.LEAVE, ("b",), urgent=True),
    ],
    ids=["loss", "failure", "leave with broken collectives"],
)
def test_urgent_cause_is_not_delayed_for_a_checkpoint(cause: Cause) -> None:
    gang = Gang()
    assert gang.due(RoundEnd(cause=cause)) == RoundEnd(cause=cause)
    assert gang.save is None
    gang.due()
    assert gang.due(RoundEnd(cause=cause)) == RoundEnd(cause=cause)


def test_member_that_vanishes_ends_the_wait() -> None:
    gang = Gang()
    gang.due()
    gang.job.gone("b")
    assert gang.due() == LEAVING


def test_planned_round_without_leave_has_more_time_to_save() -> None:
    gang = Gang()
    gang.job.change("b", state=MemberState.RUNNING)
    assert gang.due(JOINING) == Save(JOINING.cause or LEAVE, UNHURRIED_SECONDS)


def test_gang_with_save_request_is_stopped_though_the_cause_vanished() -> None:
    gang = Gang()
    gang.due()
    asked_at = gang.job.now
    gang.answered(1, 1, 1).due(NOTHING, after=2)
    gang.job.change("a", completed=True)
    assert gang.due(NOTHING, after=3) == RoundEnd(cause=LEAVE, symptom=asked_at)


def test_script_that_ends_during_the_save_is_not_stopped() -> None:
    gang = Gang()
    gang.due(JOINING)
    gang.job.done("a")
    gang.answered(-1, 4, 4)
    assert isinstance(gang.due(NOTHING), Save), "or they would wait for a place for ever"
    assert gang.due(NOTHING, after=100) is None


def test_healthy_round_needs_no_save() -> None:
    assert Gang().due(NOTHING) is None
