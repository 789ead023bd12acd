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
    Restore,
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


def keeping(kept: str = "abc") -> Gang:
    gang = Gang()
    for name in kept:
        gang.job.change(name, saves=False, keeps=True)
    return gang


def test_gang_that_keeps_its_state_in_memory_is_asked_unless_the_job_ends() -> None:
    assert keeping().due(ends_job=True) == LEAVING
    assert keeping().due() == Save(LEAVE, 25.0)


def test_gang_of_which_only_some_keep_their_state_is_not_asked() -> None:
    assert keeping("b").due() == LEAVING


def test_gang_that_leaves_as_a_whole_is_not_asked_to_keep_its_state() -> None:
    gang = keeping()
    for name in "ac":
        gang.job.change(name, state=MemberState.LEAVING)
    assert gang.due() == LEAVING


def restoring(**restores: Restore) -> Gang:
    """Return a gang in which the named members report their restore, and have no flags yet."""
    gang = Gang()
    for name in "abc":
        restore = restores.get(name, Restore.NONE)
        gang.job.change(name, saves=False, restore=restore)
    return gang


def resumed(gang: Gang, names: str) -> None:
    for name in names:
        gang.job.change(name, restore=Restore.DONE, keeps=True)


def test_leave_of_memory_that_is_being_restored_waits_until_all_members_have_saved_a_step() -> None:
    gang = restoring(a=Restore.PENDING, b=Restore.PENDING)
    assert gang.due() is None
    resumed(gang, "b")
    assert gang.due(after=4.0) is None, "nothing is known of c, and a has not saved"
    resumed(gang, "ac")
    assert gang.due(after=2.0) == Save(LEAVE, 19.0)


def test_leave_of_memory_that_is_being_restored_is_bounded_by_its_grace() -> None:
    gang = restoring(b=Restore.PENDING)
    assert gang.due() is None
    assert gang.timers.wake == pytest.approx(gang.job.now + 25.0)
    assert gang.due(after=24.9) is None
    assert gang.due(after=0.2) == LEAVING


@pytest.mark.parametrize(
    "restores",
    [{}, {"a": Restore.PENDING, "c": Restore.PENDING}, dict.fromkeys("abc", Restore.DONE)],
    ids=["no snapshots", "the member that leaves has none", "restored by all"],
)
def test_leave_does_not_wait_for_other_memory(restores: dict[str, Restore]) -> None:
    assert restoring(**restores).due() == LEAVING


def test_restore_is_not_awaited_if_no_memory_stays_or_the_gang_is_incomplete() -> None:
    gang = restoring(**dict.fromkeys("abc", Restore.PENDING))
    gang.job.change("c", round=0, state=MemberState.WAITING)
    assert gang.due() == LEAVING
    gang = restoring(**dict.fromkeys("abc", Restore.PENDING))
    for name in "ac":
        gang.job.change(name, state=MemberState.LEAVING)
    assert gang.due() == LEAVING


@pytest.mark.parametrize("way", ["saves", "keeps"])
@pytest.mark.parametrize("restore", [Restore.PENDING, Restore.DONE])
def test_gang_that_can_save_is_asked_without_a_wait_for_the_reports_of_the_restore(
    restore: Restore, way: str
) -> None:
    """Members of an earlier release never report it."""
    gang = restoring(b=restore)
    for name in "abc":
        gang.job.change(name, **{way: True})
    assert gang.due() == Save(LEAVE, 25.0)


def test_wait_for_a_restore_that_was_given_up_does_not_shorten_the_next_one() -> None:
    gang = restoring(a=Restore.PENDING, b=Restore.PENDING)
    smaller = RoundEnd(cause=Cause(CauseKind.SCALE_DOWN))
    assert gang.due(smaller) is None
    assert gang.due(NOTHING, after=10.0) is None
    assert gang.due(after=20.0) is None
    assert gang.due(after=24.9) is None
    resumed(gang, "abc")
    assert gang.due(NOTHING) is None
    assert gang.due(after=600.0) == Save(LEAVE, 25.0)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        (CauseKind.JOIN, False),
        (CauseKind.PREEMPTION, True),
        (CauseKind.SCALE_DOWN, True),
        (CauseKind.LOSS, False),
        (CauseKind.FAILURE, False),
    ],
)
def test_only_members_that_go_keep_a_round_that_restores(kind: CauseKind, waits: bool) -> None:
    gang = restoring(a=Restore.PENDING, b=Restore.PENDING)
    end = RoundEnd(cause=Cause(kind))
    assert gang.due(end) == (None if waits else end)


def test_end_of_the_job_does_not_wait_for_a_restore() -> None:
    gang = restoring(**dict.fromkeys("abc", Restore.PENDING))
    end = RoundEnd(cause=Cause(CauseKind.LEAVE, (), "Suspended"))
    assert gang.due(end, ends_job=True) == end, "although a node leaves"


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
