"""Writes of the coordinator when a final round ends, or when it asks to save beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    MemberState,
    Outcome,
    OutcomeKind,
    Restore,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.params import ClosingRequest
from tests.unit.rendezvous.builders import Job, identity, lose_link

LEAVING = MemberState.LEAVING


def note(job: Job) -> str:
    act = job.decide()
    assert act is not None
    return act.note


# -- asking to save -------------------------------------------------------------------


def leaver(**bounds: Any) -> Job:
    """b leaves a gang that wants to save, and nobody else has followed it."""
    job = Job("a", "b", "c", **{"leave_seconds": 30.0, "expected": 3, **bounds})
    job.sealed("a", "b", "c")
    for name in "abc":
        job.change(name, saves=True)
    job.change("b", state=LEAVING, reason="drained").idle()
    return job.later(1)


def answered(job: Job, places: int = 7) -> Job:
    for name in "abc":
        job.change(name, passed=places)
    return job


def test_save_request_is_written_into_the_round() -> None:
    before = leaver().current()
    current = leaver().act()
    assert current.save is not None
    assert (current.save.cause.members, current.save.seconds, current.save.point) == (("b",), 25, 0)
    assert (current.number, current.state, current.nodes) == (1, RoundState.FINAL, before.nodes)


def test_save_step_is_written_once_all_have_answered() -> None:
    job = leaver()
    job.act()
    save = answered(job).act().save
    assert save is not None
    assert (save.seconds, save.point) == (25, 8)


def test_log_of_save_request_names_cause_and_time() -> None:
    said = note(leaver())
    assert "leave" in said
    assert "25" in said


def test_log_of_save_step_names_the_step() -> None:
    job = leaver()
    job.act()
    said = note(answered(job))
    assert "leave" in said
    assert "8" in said
    assert "25" not in said


# -- the next round -------------------------------------------------------------------


def test_detection_time_is_in_milliseconds() -> None:
    job = Job("a", "b", expected=2).sealed("a", "b").idle().later(60)
    lose_link(job.coordinator.peers, identity("b"), job.now - 4.0)
    assert job.gone("b", proven=True).act().number == 2
    assert job.coordinator.detected_ms == {2: 4000}


def test_wait_for_a_restore_does_not_count_as_detection_time() -> None:
    job = Job("a", "b", leave_seconds=30.0, expected=2).sealed("a", "b").idle()
    job.change("b", state=LEAVING, restore=Restore.PENDING).idle().later(1).idle().later(10)
    assert job.change("b", restore=Restore.NONE).act().number == 2
    assert job.coordinator.detected_ms == {2: 1000}


@pytest.mark.parametrize(("step", "row"), [(-1, 3), (0, 0), (1, 0)])
def test_first_step_of_any_member_ends_a_row_of_failures(step: int, row: int) -> None:
    job = Job("a", "b").sealed("a", "b", streak=Streak(2)).change("a", step=step).idle()
    current = job.failure("b", ran_ms=1000).act()
    assert current.streak.row == row


def test_step_of_an_older_round_ends_no_row_of_failures() -> None:
    job = Job("a", "b").sealed("a", "b", streak=Streak(2)).member("c", round=0, step=7)
    assert job.failure("b", ran_ms=1000).act().streak.row == 3


def test_failure_that_closes_the_job_counts_in_the_row() -> None:
    job = Job("a", "b", max_restarts=0).sealed("a", "b", streak=Streak(2)).idle()
    closed = job.failure("b", ran_ms=1000).act()
    assert (closed.state, closed.charged, closed.streak.row) == (RoundState.CLOSED, (1,), 3)


def test_job_with_whole_roster_done_succeeded() -> None:
    closed = Job("a", "b").sealed("a", "b").done("a", "b").act()
    assert (closed.state, closed.outcome) == (RoundState.CLOSED, Outcome(OutcomeKind.SUCCEEDED))


def test_log_of_new_round_names_first_three_members_of_its_cause() -> None:
    job = Job(*"abcde", max_nodes=5, expected=5).sealed(*"abcde").idle().later(60)
    said = note(job.gone(*"bcde", proven=True))
    assert "2" in said
    assert "loss" in said
    assert "b, c, d" in said
    assert ", e" not in said


def test_log_of_new_round_without_members_ends_with_its_kind() -> None:
    job = Job(*"abc", expected=3).sealed(*"abc").bounds(max_nodes=2, stop_grace_seconds=0)
    act = job.decide()
    assert act is not None
    assert act.note == act.note.strip()
    job.commit(act.txn)
    assert job.current().cause.kind is CauseKind.SCALE_DOWN


# -- end of the job -------------------------------------------------------------------

SUSPENDED = Outcome(OutcomeKind.STOPPED, "Suspended", reason="Suspended")


FULL = "rank 1: /checkpoints: No space left on device"


def closing(saves: str = "abc", **bounds: Any) -> Job:
    """Return a gang whose job is to be closed; those named in `saves` save on request."""
    request = ClosingRequest(SUSPENDED)
    fields = {"leave_seconds": 30.0, "expected": 3, "closing": request, **bounds}
    job = Job("a", "b", "c", **fields)
    job.sealed("a", "b", "c")
    for name in "abc":
        job.change(name, saves=name in saves, step=163, checkpoint_step=120)
    return job


def report_of(job: Job) -> SaveReport:
    current = job.act()
    assert (current.state, current.number) == (RoundState.CLOSED, 1)
    assert current.outcome is not None
    assert current.outcome.save is not None
    assert replace(current.outcome, save=None) == SUSPENDED
    return current.outcome.save


def asking() -> Job:
    """Return a gang that was asked to save before the end of its job, and has answered."""
    job = closing()
    save = job.act().save
    assert save is not None
    assert (save.cause.reasons, save.seconds, save.point) == (("Suspended",), 25, 0)
    answered(job).act()
    return job


def test_state_in_memory_is_no_checkpoint_before_the_end_of_the_job() -> None:
    job = closing(saves="")
    for name in "abc":
        job.change(name, keeps=True)
    assert report_of(job).result is SaveResult.NOT_SUPPORTED


def test_job_closed_while_its_gang_keeps_its_state_has_no_checkpoint() -> None:
    job = asking()  # as before a change of the nodes
    for name in "abc":
        job.change(name, saves=False, keeps=True)
    assert job.decide() is None
    job.change("b", completed=True)
    assert report_of(job).result is SaveResult.NOT_SUPPORTED


def test_job_is_closed_once_the_gang_has_saved() -> None:
    job = asking()
    assert job.decide() is None
    job.change("b", completed=True, step=164, checkpoint_step=164)
    assert report_of(job) == SaveReport(SaveResult.SAVED, 164, 164)


@pytest.mark.parametrize("saved", ["", "ab"])
def test_job_is_closed_without_the_checkpoint_after_the_grace(saved: str) -> None:
    job = asking()
    for name in saved:
        job.change(name, saved=True)
    assert job.decide() is None
    job.later(24.9)
    assert job.decide() is None
    unsaved = tuple(name for name in "abc" if name not in saved)
    assert report_of(job.later(0.2)) == SaveReport(SaveResult.TIMED_OUT, 163, 120, unsaved)


def test_job_is_closed_once_all_members_report_that_their_save_failed() -> None:
    job = asking()
    for name in "ab":
        job.change(name, save_error=FULL)
        assert job.decide() is None, "another member may complete it"
    job.change("c", save_error=FULL)
    report = report_of(job)
    assert report == SaveReport(SaveResult.TIMED_OUT, 163, 120, ("a", "b", "c"), FULL)
    assert report.kind is SaveResult.SAVE_FAILED


def test_checkpoint_of_one_member_counts_for_members_whose_save_failed() -> None:
    job = asking()
    for name in "abc":
        job.change(name, save_error=FULL)
    job.change("b", completed=True)
    assert report_of(job).kind is SaveResult.SAVED


@pytest.mark.parametrize(
    ("saves", "leave_seconds", "result", "unsaved"),
    [
        ("ab", 30.0, SaveResult.NOT_SUPPORTED, ("c",)),
        ("", 30.0, SaveResult.NOT_SUPPORTED, ("a", "b", "c")),
        ("abc", 5.0, SaveResult.NO_TIME, ()),
    ],
)
def test_job_that_cannot_save_is_closed_at_once(
    saves: str, leave_seconds: float, result: SaveResult, unsaved: tuple[str, ...]
) -> None:
    job = closing(saves, leave_seconds=leave_seconds)
    assert report_of(job) == SaveReport(result, 163, 120, unsaved)


def test_failure_during_the_save_closes_the_job_instead_of_a_new_round() -> None:
    job = asking()
    job.failure("b")
    assert report_of(job).result is SaveResult.INTERRUPTED


def test_leaving_members_save_with_the_others_and_open_no_round() -> None:
    job = closing()
    for name in "bc":
        job.change(name, state=LEAVING, reason="deleted")
    assert job.act().save is not None
    answered(job).act()
    job.change("c", completed=True)
    assert report_of(job).result is SaveResult.SAVED


def test_success_of_all_precedes_the_end() -> None:
    job = asking()
    for name in "abc":
        job.done(name)
    outcome = job.act().outcome
    assert outcome == Outcome(OutcomeKind.SUCCEEDED)


def test_withdrawn_end_opens_the_next_round_after_the_save() -> None:
    job = asking()
    for name in "abc":
        job.change(name, saved=True)
    job.bounds(closing=None)
    current = job.act()
    assert (current.number, current.state) == (2, RoundState.JOINABLE)


@pytest.mark.parametrize("state", [RoundState.JOINABLE, RoundState.FROZEN])
def test_job_without_a_final_round_is_closed_at_once(state: RoundState) -> None:
    job = Job("a", "b", expected=2, closing=ClosingRequest(SUSPENDED)).round(1, state)
    assert report_of(job) == SaveReport(SaveResult.NOT_TRAINING)
