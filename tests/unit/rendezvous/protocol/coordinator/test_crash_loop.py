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
from elasticjob_rendezvous.protocol.records.codec import decode, encode
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
    detail = crash_loop.put_right(current, [first, known]).detail
    assert detail.startswith("rank 0 on b ended with exit code 1: boom")
    assert ("backing off 2 s" in detail) is pauses


# -- members that are cut off repeatedly ----------------------------------------------


def lost_again(*, cuts: int, lost: tuple[str, ...] = ("b",), **bounds: Any) -> Job:
    """Return a job that lost b in round 1, after `cuts` such rounds; b is back and round 2 open."""
    ids = tuple(identity(name) for name in lost)
    job = Job("a", "b", "c", **{"min_nodes": 3, "max_nodes": 3, **bounds})
    job.sealed("a", "b", "c", streak=Streak(cuts=cuts, lost=ids)).idle().later(5)
    job.gone("b", proven=True).act()
    for name in "ac":
        job.change(name, state=MemberState.WAITING, round=1)
    return job.member("b", session="s2", round=1)


@pytest.mark.parametrize(
    ("cuts", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (8, 60), (900, 60)]
)
def test_back_off_of_members_that_are_cut_off_doubles_up_to_a_minute(
    cuts: int, seconds: float
) -> None:
    assert crash_loop.return_seconds(Streak(cuts=cuts)) == seconds


def test_third_loss_of_a_member_holds_the_round_that_needs_it_back() -> None:
    job = lost_again(cuts=1)
    current = job.current()
    assert (current.streak.cuts, current.streak.lost) == (2, (identity("b"),))
    text = (
        "cut off before the first step, the third time in a row: too little processor time, or no "
        "network; backing off 1 s"
    )
    assert (current.cause.detail, current.cause.reasons) == (text, (text,))
    job.idle().later(0.9).idle()
    assert job.later(0.1).act().state is RoundState.FROZEN


def test_back_off_of_a_member_is_part_of_the_costs_of_its_round() -> None:
    job = lost_again(cuts=2).idle().later(2)
    current = job.act()
    stored = job.view().round
    assert stored is not None
    job.decide()
    for id in current.ids:
        job.change(id.removeprefix("id-"), confirmed=stored.modified)
    job.act()
    history = job.read(History, KEYS.history(2))
    assert (history.backoff_ms, history.join_ms) == (2000, 0)


def test_others_train_at_once_without_a_member_that_is_cut_off_repeatedly() -> None:
    current = lost_again(cuts=5, min_nodes=2).act()
    assert (current.state, current.ids) == (RoundState.FROZEN, (identity("a"), identity("c")))


@pytest.mark.parametrize(("seconds", "joins"), [(3.9, False), (4.0, True)])
def test_member_that_was_cut_off_joins_after_its_back_off(seconds: float, joins: bool) -> None:
    job = Job("a", "b", min_nodes=1, max_nodes=2, settle_seconds=0)
    streak = Streak(cuts=4, lost=(identity("b"),))
    job.sealed("a", streak=streak).change("b", session="s2").idle().later(seconds)
    if joins:
        assert job.act().cause.kind is CauseKind.JOIN
    else:
        job.idle()


@pytest.mark.parametrize("lost", [(), ("c",)], ids=["first loss", "loss of another member"])
def test_first_loss_of_a_member_has_no_back_off(lost: tuple[str, ...]) -> None:
    """Neither during the back-off of others: that is over once they are in a round."""
    job = lost_again(cuts=1, lost=lost)
    current = job.current()
    assert current.streak.cuts == 1
    assert set(current.streak.lost) == {identity(name) for name in (*lost, "b")}
    assert current.cause.detail == ""
    assert job.act().state is RoundState.FROZEN


@pytest.mark.parametrize("end", ["a step", "a minute"])
def test_training_ends_a_row_of_cut_offs(end: str) -> None:
    job = Job("z", "a", "b", min_nodes=2, max_nodes=2)
    job.sealed("a", "b", streak=Streak(cuts=7, lost=(identity("b"),))).idle()
    if end == "a step":
        job.change("a", step=3).later(1)
    else:
        job.later(60)
    streak = job.gone("b", proven=True).act().streak
    assert (streak.cuts, streak.lost) == (0, ())


def test_failure_after_a_step_ends_a_row_of_cut_offs() -> None:
    streak = after_failure(Streak(cuts=3, lost=("b",)), [a_failure("a", step=4)], Life(1.0))
    assert (streak.cuts, streak.lost) == (0, ())


def test_failure_before_a_step_keeps_a_row_of_cut_offs() -> None:
    streak = after_failure(Streak(cuts=3, lost=("b",)), [a_failure("a")], Life(1.0))
    assert streak == Streak(row=1, cuts=3, lost=("b",))


def test_abort_that_a_cut_off_explains_counts_as_cut_off() -> None:
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(cuts=2, lost=(identity("b"),))).idle().later(5)
    current = job.failure("a", kind=ABORT).act()
    assert (current.streak.cuts, current.pending) == (2, (1,))
    current = job.change("b", session="s2").act()
    assert (current.streak.cuts, current.charged, current.pending) == (3, (), ())
    assert current.cause.reasons[-1] == "PeersAborted"
    assert "the fourth time in a row: " in current.cause.detail
    assert "backing off 2 s; its peers' collectives broke" in current.cause.detail


def test_steps_of_an_ended_round_are_known_from_reports_after_it() -> None:
    """A new coordinator did not observe the round itself."""
    job = Job("z", "a", "b", max_nodes=2, max_restarts=9)
    job.sealed("a", "b", streak=Streak(cuts=2, lost=(identity("b"),))).idle().later(5)
    job.failure("a", kind=ABORT).act()
    job.change("a", ended_round=1, ended_step=9)
    streak = job.change("b", session="s2").act().streak
    assert (streak.cuts, streak.lost) == (2, (identity("b"),))


def test_members_noted_as_lost_are_limited() -> None:
    names = [f"m{number}" for number in range(40)]
    job = Job("z", *names, max_nodes=40)
    job.sealed(*names, streak=Streak(lost=("old",))).idle().later(1)
    lost = job.gone(*names[:30], proven=True).act().streak.lost
    assert len(lost) == crash_loop.MAX_LOST
    assert "old" not in lost


def test_streak_of_an_earlier_release_has_no_cut_offs() -> None:
    stored = decode(Streak, "round", b'{"row":2,"step":5,"times":1}')
    assert stored == Streak(2, 5, 1, 0, ())
    assert encode(stored) == b'{"row":2,"step":5,"times":1}'
