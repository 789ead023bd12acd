"""Crash-loop back-off: the pause before the next recovery, and the end without progress."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import crash_loop
from elasticjob_rendezvous.protocol.coordinator.crash_loop import (
    SOON_SECONDS,
    Life,
    after_failure,
    pause_seconds,
)
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    OutcomeKind,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.rendezvous.builders import KEYS, Job, a_failure, a_round, identity

SOON_MS, LATE_MS = 3_000, int(SOON_SECONDS * 1000)
ABORT = FailureClass.PEER_ABORT


def failed(*failures: dict[str, Any], seconds: float = 3.0, stepped: bool = False) -> Streak:
    """Return the streak after these consecutive failures, each a charge of its own."""
    streak = Streak()
    for fields in failures:
        streak = after_failure(streak, [a_failure("a", **fields)], Life(seconds, stepped))
    return streak


@pytest.mark.parametrize(
    ("row", "seconds"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (7, 32), (8, 60), (9, 60), (5000, 60)],
)
def test_back_off_doubles_up_to_a_minute(row: int, seconds: float) -> None:
    assert pause_seconds(Streak(row)) == seconds


@pytest.mark.parametrize(
    ("failures", "row"),
    [
        ([{}, {}, {}], 3),
        ([{"ran_ms": SOON_MS}, {"ran_ms": LATE_MS - 1}], 2),
        ([{}, {}, {"ran_ms": LATE_MS}], 0),
        ([{}, {"step": 0}], 0),
        ([{"step": 9}, {}, {}], 2),
    ],
    ids=[
        "at their start",
        "within a minute",
        "after a minute",
        "after a first step",
        "without a step again",
    ],
)
def test_training_ends_a_row_of_failures(failures: list[dict[str, Any]], row: int) -> None:
    assert failed(*failures).row == row


def test_long_round_seen_by_the_coordinator_ends_a_row_of_failures() -> None:
    assert failed({}, {}, seconds=SOON_SECONDS).row == 0
    assert failed({}, {}, seconds=0.0).row == 2


def test_steps_of_any_worker_count_as_training() -> None:
    """Often one rank alone reports steps, and another one fails."""
    assert failed({}, {}, stepped=True).row == 0
    found = [a_failure("a"), a_failure("b", kind=ABORT, step=3)]
    assert after_failure(Streak(2), found, Life(1.0)).row == 0


@pytest.mark.parametrize(("life", "row"), [((59.9, False), 4), ((60, False), 0), ((1, True), 0)])
def test_training_round_with_another_end_ends_the_row(life: tuple[float, bool], row: int) -> None:
    after = crash_loop.after_round(Streak(row=4, step=7, times=2), Life(*life))
    assert after == Streak(row, 7, 2)


@pytest.mark.parametrize(
    ("steps", "times"),
    [([7], 1), ([7, 7, 7], 3), ([7, 8, 7], 1), ([7, None, 7], 2), ([None, None, None], 0)],
)
def test_failures_at_one_step_are_counted(steps: list[int | None], times: int) -> None:
    streak = failed(*({"step": step, "ran_ms": LATE_MS} for step in steps))
    assert (streak.times, crash_loop.is_without_progress(streak)) == (times, times >= 3)


def test_step_of_the_first_failure_counts() -> None:
    """The culprit's peers, whose collectives broke, may have reported another step."""
    found = [a_failure("a", step=6, kind=ABORT), a_failure("b", step=7)]
    assert after_failure(Streak(), found, Life(1.0)).step == 7


# -- in the coordinator -------------------------------------------------------------


def crashed(row: int, **fields: Any) -> Job:
    """Return a job whose workers failed soon in round 1, after `row` failures; round 2 is open."""
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9, join_timeout_seconds=1)
    job.sealed("a", "b", streak=Streak(row)).idle().later(5)
    job.failure("b", ran_ms=SOON_MS, **fields)
    job.act()
    for name in "ab":
        job.change(name, state=MemberState.WAITING, round=1)
    return job


def test_recovery_waits_for_the_back_off_and_names_it() -> None:
    job = crashed(3)
    current = job.current()
    assert (current.streak.row, current.charged) == (4, (1,))
    assert "backing off 4 s after the fourth failure in a row" in current.cause.detail
    job.idle().later(3.9).idle()
    assert job.later(0.1).act().state is RoundState.FROZEN


@pytest.mark.parametrize("verdict", ["at once", "later"])
def test_job_that_trained_is_not_delayed(verdict: str) -> None:
    """Rank 0 reported a step; another rank failed."""
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(5)).idle().later(5).change("a", step=17)
    if verdict == "at once":
        current = job.failure("b").act()
    else:
        job.failure("b", kind=ABORT).act()
        for name in "ab":
            job.change(name, step=-1)
        current = job.idle().later(12).act()
    assert (current.charged, current.streak.row) == ((1,), 0)


def test_back_off_is_separate_from_other_times_of_the_round() -> None:
    job = crashed(2).idle().later(2)
    current = job.act()
    assert current.state is RoundState.FROZEN
    stored = job.view().round
    assert stored is not None
    job.decide()
    for id in current.ids:
        job.change(id.removeprefix("id-"), confirmed=stored.modified)
    job.act()
    history = job.read(History, KEYS.history(2))
    assert (history.backoff_ms, history.join_ms) == (2000, 0)


@pytest.mark.parametrize("row", [0, 1])
def test_first_failures_have_no_back_off(row: int) -> None:
    job = crashed(row - 1)
    assert "backing off" not in job.current().cause.detail
    assert job.act().state is RoundState.FROZEN


@pytest.mark.parametrize("trouble", ["loss", "leave"])
def test_interruption_has_no_back_off(trouble: str) -> None:
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(6), charged=(9,)).idle().later(5)
    if trouble == "loss":
        job.gone("b", proven=True)
    else:
        job.change("b", state=MemberState.LEAVING).idle().later(1)
    current = job.act()
    assert (current.streak.row, "backing off" in current.cause.detail) == (6, False)
    job.change("a", state=MemberState.WAITING, round=1)
    if trouble == "leave":
        job.change("b", stopped=True)
    assert job.act().state is RoundState.FROZEN


def test_abort_has_back_off_once_charged() -> None:
    """An uncharged abort may be a loss, which causes no pause."""
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(4)).idle().later(5).failure("a", kind=ABORT)
    current = job.act()
    assert (current.streak.row, current.pending) == (4, (1,))
    job.idle().later(12)  # no member has reported stopped workers
    current = job.act()
    assert (current.streak.row, current.charged) == (5, (1,))
    assert "backing off 8 s" in current.cause.detail
    for name in "ab":
        job.change(name, state=MemberState.WAITING, round=1)
    job.idle().later(8)
    assert job.act().state is RoundState.FROZEN


def test_three_failures_at_one_step_end_the_job_early() -> None:
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(0, 120, 2), charged=(7, 8)).idle().later(500)
    current = job.failure("b", rank=3, step=120, ran_ms=LATE_MS, message="ValueError: nan").act()
    assert (current.state, current.charged) == (RoundState.CLOSED, (7, 8, 1))
    assert current.outcome is not None
    assert current.outcome.kind is OutcomeKind.FAILED
    assert current.outcome.detail == (
        "no progress: the third failure in a row at step 120: "
        "rank 3 on b ended with exit code 1: ValueError: nan"
    )


def test_unconfirmed_round_does_not_wait_twice() -> None:
    job = crashed(3).idle().later(4)
    assert job.act().state is RoundState.FROZEN
    job.change("b", state=MemberState.LEAVING, stopped=True)
    job.bounds(min_nodes=2, max_nodes=2, max_restarts=9)
    current = job.idle().later(6).act()
    assert (current.state, current.cause.kind) == (RoundState.JOINABLE, CauseKind.UNCONFIRMED)
    job.member("c").change("c", round=1)
    job.bounds(min_nodes=1, max_nodes=2, max_restarts=9)
    job.later(60)
    assert identity("a") in job.act().ids


def test_back_off_is_appended_to_the_cause() -> None:
    cause = crash_loop.explained(Cause(CauseKind.FAILURE, ("b",), "boom"), Streak(row=2))
    assert cause.detail == "boom; backing off 1 s after the second failure in a row"
    assert crash_loop.explained(Cause(CauseKind.FAILURE), Streak(row=11)).detail.startswith(
        "backing off 60 s after the 11th"
    )


@pytest.mark.parametrize(("row", "said"), [(2, "second"), (8, "eighth"), (9, "9th"), (12, "12th")])
def test_each_failure_in_a_row_has_its_ordinal(row: int, said: str) -> None:
    detail = crash_loop.explained(Cause(CauseKind.FAILURE), Streak(row=row)).detail
    assert detail.endswith(f" s after the {said} failure in a row")


def test_round_without_failure_records_counts_as_another_failure() -> None:
    assert after_failure(Streak(2), [], Life(1.0)) == Streak(3)


@pytest.mark.parametrize(
    ("began", "next_opened", "seconds"),
    [(None, None, 0.0), (None, 8.0, 0.0), (5.0, None, 15.0), (5.0, 8.0, 3.0)],
    ids=["not seen", "end seen", "open until now", "ended when the next round opened"],
)
def test_life_of_a_round_is_from_final_to_the_next_round(
    began: float | None, next_opened: float | None, seconds: float
) -> None:
    timers = Timers(now=20.0)
    timers.start(("state", 6, RoundState.FINAL), 1.0)
    timers.start(("state", 6, RoundState.JOINABLE), 2.0)
    if began is not None:
        timers.start(("state", 7, RoundState.FINAL), began)
    if next_opened is not None:
        timers.start(("state", 8, RoundState.JOINABLE), next_opened)
    timers.start(("state", 9, RoundState.JOINABLE), 19.0)
    assert crash_loop.lived(7, timers) == Life(seconds)
    timers.start(("stepped", 7), 6.0)
    assert crash_loop.lived(7, timers) == Life(seconds, stepped=True)


@pytest.mark.parametrize(("charged", "pauses"), [((1,), True), ((), False)])
def test_corrected_cause_names_the_back_off_of_a_charged_round(
    charged: tuple[int, ...], pauses: bool
) -> None:
    first, known = a_failure("a", kind=ABORT), a_failure("b", message="boom")
    cause = Cause(CauseKind.FAILURE, ("a",), "rank 0 on a failed")
    current = a_round(2, cause=cause, previous=1, charged=charged, streak=Streak(3))
    detail = crash_loop.corrected_cause(current, [first, known]).detail
    assert detail.startswith("rank 0 on b ended with exit code 1: boom")
    assert ("backing off 2 s" in detail) is pauses
