"""Goodput of a run: pauses, repeated steps, waits, suspension, and the loss of all nodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.observed.state import RendezvousView
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import Phase, Status
from elasticjob_operator.model.status import SnapshotsStatus
from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind, Snapshots
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.operator.builders import (
    NOW,
    ago,
    final_round,
    history,
    job,
    later,
    observed,
    running,
)

START = history(1, final_at=ago(101), start_ms=600, first_step_ms=400)
"""First round, whose first step is 100 s ago."""
LOSS = history(
    2, "loss", final_at=ago(50), detect_ms=100, stop_ms=200, start_ms=300, first_step_ms=400,
    lost_steps=1, lost_ms=200,
)  # fmt: skip


def view(*rounds: History, **changes: Any) -> RendezvousView:
    """Return a final round, the last of these, whose members report snapshots."""
    found = final_round(2, rounds[-1].number, rounds=rounds, **changes)
    told = tuple(replace(one, snapshots=Snapshots(9)) for one in found.members)
    return replace(found, members=told)


def waiting(*rounds: History, since: datetime) -> RendezvousView:
    """Return the joinable round after these."""
    return replace(
        view(*rounds), state=RendezvousState.JOINABLE, round=rounds[-1].number + 1, since=since
    )


def status_of(
    seen: RendezvousView, before: Status | None = None, at: datetime = NOW, **spec: Any
) -> Status:
    return next_status(job(before, **spec), observed(*running(2), view=seen), seen, at)


def counted(status: Status) -> SnapshotsStatus:
    assert status.snapshots is not None
    return status.snapshots


def restarted(status: Status) -> Status:
    """Return the status as the operator's next process reads it."""
    return Status.model_validate(status.model_dump(by_alias=True))


def test_losses_and_pauses_are_added_once_for_each_round() -> None:
    first = status_of(view(START, LOSS))
    found = counted(first)
    assert (found.lost_steps, found.lost_ms, found.paused_ms) == (1, 200, 1000)
    assert (found.counted_round, found.since) == (2, ago(100))
    assert found.goodput_percent == 98  # 1.2 s of 100 s, rounded down
    assert counted(status_of(view(START, LOSS), restarted(first))) == found
    after = counted(status_of(view(START, LOSS), first, later(1100)))
    assert (after.lost_ms, after.goodput_percent) == (200, 99)
    # The status keeps the totals of rounds that it no longer lists.
    third = history(
        3, "failure", final_at=ago(9), start_ms=50, first_step_ms=50, lost_steps=2, lost_ms=300
    )
    grown = counted(status_of(view(third), first))
    assert (grown.lost_steps, grown.lost_ms, grown.paused_ms) == (3, 500, 1100)


def test_time_before_the_first_step_does_not_count() -> None:
    early = history(1, final_at=ago(500))
    assert counted(status_of(view(early))).goodput_percent is None
    begun = history(2, "failure", final_at=ago(101), detect_ms=9, start_ms=600, first_step_ms=400)
    found = counted(status_of(view(early, begun)))
    assert (found.goodput_percent, found.paused_ms, found.since) == (100, 0, ago(100))


def test_planned_change_pauses_from_its_decision() -> None:
    join = history(
        2, "join", final_at=ago(50), detect_ms=40_000, stop_ms=200, start_ms=300, first_step_ms=500
    )
    assert counted(status_of(view(START, join))).paused_ms == 1000


def test_wait_for_nodes_is_lost_time_while_it_lasts_and_after() -> None:
    trained = status_of(view(START), at=ago(60))
    assert counted(trained).goodput_percent == 100
    waits = status_of(waiting(START, since=ago(50)), trained)
    assert counted(waits).goodput_percent == 50
    assert counted(waits).paused_since == ago(50)
    still = counted(status_of(waiting(START, since=ago(50)), restarted(waits), later(100)))
    assert still.goodput_percent == 25
    # The record of the next round has the whole wait.
    joined = history(
        2, "loss", final_at=later(100), join_ms=150_000, start_ms=600, first_step_ms=400
    )
    after = counted(status_of(view(START, joined), waits, later(101)))
    assert (after.paused_ms, after.paused_since) == (151_000, None)
    assert after.goodput_percent == 24


def test_round_without_a_first_step_is_lost_time() -> None:
    broken = history(2, "failure", final_at=ago(80), stop_ms=1000, start_ms=300)
    current = counted(status_of(view(START, broken)))
    assert (current.counted_round, current.goodput_percent) == (1, 19)  # 81 s of 100 s
    again = history(3, "failure", final_at=ago(41), stop_ms=5, start_ms=600, first_step_ms=400)
    found = counted(status_of(view(START, broken, again)))
    assert (found.counted_round, found.paused_ms) == (3, 41_000)  # from 81 s ago to 40 s ago
    assert (found.goodput_percent, found.paused_since) == (59, None)


def test_pause_outlasts_the_list_of_rounds() -> None:
    broken = history(2, "failure", final_at=ago(80), stop_ms=1000)
    seen = status_of(view(START, broken))
    last = history(20, "failure", final_at=ago(11), start_ms=600, first_step_ms=400)
    found = counted(status_of(view(last), restarted(seen).model_copy(update={"rounds": []})))
    assert found.paused_ms == 71_000


def test_pause_of_a_recovery_is_exact_although_the_status_has_whole_seconds() -> None:
    trained = status_of(view(START), at=ago(51))
    opened = status_of(waiting(START, since=ago(50.4)), trained, ago(50))
    begun = replace(LOSS, first_step_ms=None, lost_steps=None, lost_ms=None)
    formed = status_of(view(START, begun), restarted(opened), ago(49))
    found = counted(status_of(view(START, LOSS), restarted(formed)))
    assert found.paused_ms == 1000


def test_loss_of_all_nodes_is_lost_time_from_its_observation() -> None:
    trained = status_of(view(START), at=ago(60))
    gone = replace(view(START), members=())
    seen = status_of(gone, trained, ago(50))
    assert counted(seen).paused_since == ago(50)
    assert counted(status_of(gone, restarted(seen))).goodput_percent == 50
    # A new coordinator knows nothing about the time before it.
    formed = history(2, "loss", final_at=ago(1), join_ms=5, start_ms=600, first_step_ms=400)
    found = counted(status_of(view(START, formed), restarted(seen)))
    assert (found.paused_ms, found.goodput_percent) == (50_000, 50)


def test_members_that_return_to_their_round_have_not_paused() -> None:
    trained = status_of(view(START), at=ago(60))
    seen = status_of(replace(view(START), members=()), trained, ago(50))
    found = counted(status_of(view(START), seen))
    assert (found.paused_since, found.goodput_percent) == (None, 100)


def suspended(at: datetime) -> RendezvousView:
    outcome = Outcome(OutcomeKind.STOPPED, reason="Suspended")
    closed = RendezvousState.CLOSED
    return replace(view(START, LOSS), state=closed, outcome=outcome, since=at, members=())


def test_suspension_does_not_count_and_resumption_begins_anew() -> None:
    trained = status_of(view(START, LOSS), at=ago(1))
    spec = {"runPolicy": {"suspend": True}}
    stopped = status_of(suspended(NOW), trained, later(30), **spec)
    assert stopped.phase is Phase.SUSPENDING
    assert counted(stopped).goodput_percent == 98  # of the 100 s up to the suspension
    hours = status_of(suspended(NOW), restarted(stopped), later(9000), **spec)
    assert counted(hours).goodput_percent == 98
    first = history(1, final_at=later(9099), start_ms=600, first_step_ms=400)
    resumed = counted(status_of(view(first), hours, later(9200)))
    assert (resumed.lost_steps, resumed.paused_ms, resumed.since) == (0, 0, later(9100))
    assert resumed.goodput_percent == 100


def test_end_of_the_job_ends_its_time() -> None:
    trained = status_of(view(START, LOSS), at=ago(1))
    outcome = Outcome(OutcomeKind.SUCCEEDED)
    over = replace(suspended(NOW), outcome=outcome)
    ended = status_of(over, trained, later(500))
    assert (ended.phase, counted(ended).goodput_percent) == (Phase.SUCCEEDED, 98)
    assert counted(status_of(over, ended, later(900))) == counted(ended)
    (told,) = [one for one in explanation(job(ended), running(2)) if "Goodput" in one]
    assert told.endswith("0.2 s repeated, 1.0 s paused.")
    # A pause that leads to the end counts up to it.
    waits = status_of(waiting(START, LOSS, since=ago(10)), trained)
    failed = counted(status_of(over, waits, later(500)))
    assert (failed.paused_since, failed.goodput_percent) == (ago(10), 88)


def test_lost_rounds_of_etcd_do_not_begin_a_new_run() -> None:
    trained = status_of(view(START, LOSS), at=ago(40))
    anew = history(1, "loss", final_at=ago(21), join_ms=9000, start_ms=600, first_step_ms=400)
    found = counted(status_of(view(anew), trained))
    assert (found.since, found.paused_ms, found.counted_round) == (ago(100), 11_000, 1)


def test_first_observation_of_an_old_job_equals_that_of_its_whole_life() -> None:
    third = history(
        3, "join", final_at=ago(20), stop_ms=900, start_ms=600, first_step_ms=500, lost_ms=0
    )
    rounds = (START, LOSS, third)
    watched = None
    for number in (1, 2, 3):
        for known in (None, "step"):
            current = rounds[number - 1]
            if known is None:
                current = replace(current, first_step_ms=None, lost_steps=None, lost_ms=None)
            seen = view(*rounds[: number - 1], current)
            at = NOW if number == 3 else ago(20.0 * (3 - number) + 5)
            watched = restarted(status_of(seen, watched, at))
    assert watched is not None
    assert counted(watched) == counted(restarted(status_of(view(*rounds))))


@pytest.mark.parametrize(
    "round_",
    [
        history(2, "loss", final_at=ago(5), first_step_ms=2**53, start_ms=2**53),
        history(2, "loss", final_at=ago(5), first_step_ms=1, stop_ms=2**62),
        history(2, "loss", final_at=later(10**6), first_step_ms=1),
        history(2, "loss", first_step_ms=2**62),
        history(2, "loss", final_at=ago(5), first_step_ms=2**62, start_ms=2**62),
    ],
)
def test_goodput_of_hostile_records_is_a_percentage(round_: History) -> None:
    found = counted(status_of(view(START, round_)))
    assert found.goodput_percent is not None
    assert 0 <= found.goodput_percent <= 100
    assert 0 <= found.paused_ms < 2**63


def test_explanation_has_the_goodput_with_its_losses() -> None:
    status = status_of(view(START, LOSS))
    told = explanation(job(status), running(2))
    assert (
        "Goodput 98 % since the first step at 11:58:20 UTC on 2026-01-31: 0.2 s repeated, "
        "1.0 s paused."
    ) in told
    waits = status_of(waiting(START, LOSS, since=ago(10)), status)
    assert counted(waits).paused_ms == 1000
    assert (
        "Goodput 88 % since the first step at 11:58:20 UTC on 2026-01-31: 0.2 s repeated, "
        "1.0 s paused, and the time of the pause that began at 11:59:50 UTC on 2026-01-31."
    ) in explanation(job(waits), running(2))
    without = status.model_copy(update={"snapshots": None})
    assert not any("Goodput" in one for one in explanation(job(without), running(2)))
    assert ago(100) + timedelta(seconds=100) == NOW


def at_step(
    step: int, *rounds: History, restored: int = 0, told: Snapshots | None = None
) -> RendezvousView:
    """Return a final round whose members have reached a step, and began with `restored`."""
    found = view(*rounds)
    report = told or Snapshots(step, restored=restored)
    return replace(
        found, members=tuple(replace(one, step=step, snapshots=report) for one in found.members)
    )


ANEW = history(2, "loss", final_at=ago(41), join_ms=5, start_ms=600, first_step_ms=400)
"""Round of new nodes only, whose record has no lost steps; its first step is 40 s ago."""


def lost_steps(status: Status) -> list[int | None]:
    return [one.lost_steps for one in status.rounds]


def after_the_loss_of_all(step: int, restored: int) -> Status:
    """Return the status after a loss 50 s ago, when 100 steps were reported in 50 s."""
    trained = status_of(at_step(step, START), at=ago(51))
    gone = replace(view(START), members=())
    seen = restarted(status_of(gone, trained, ago(50)))
    assert (counted(seen).reached_step, counted(seen).began_step) == (step, 0)
    begun = replace(ANEW, first_step_ms=None)
    formed = status_of(at_step(-1, START, begun, restored=restored), seen, ago(41))
    assert lost_steps(formed) == [None, None], "unknown before the first step"
    return status_of(at_step(restored + 1, START, ANEW, restored=restored), restarted(formed))


def test_steps_lost_with_all_nodes_are_counted_and_their_time_is_estimated() -> None:
    status = after_the_loss_of_all(101, restored=61)
    found = counted(status)
    assert lost_steps(status) == [None, 40]
    assert (found.lost_steps, found.reached_step, found.began_step) == (40, 62, 61)
    # 100 steps after the first in 50 s. In the record they are unknown, and so is their time.
    assert (found.lost_ms, status.rounds[-1].lost_ms) == (20_000, None)
    assert found.goodput_percent == 70  # a pause of 10 s and repeated steps of 20 s, of 100 s
    assert any("lost at least 40 steps" in one for one in explanation(job(status), running(2)))
    later_on = restarted(status_of(at_step(90, START, ANEW, restored=61), restarted(status)))
    assert lost_steps(later_on) == [None, 40]
    assert (counted(later_on).lost_steps, counted(later_on).reached_step) == (40, 90)


def test_round_whose_step_is_not_reported_yet_has_reached_its_begin() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    status = status_of(at_step(-1, START, ANEW, restored=61), trained)
    found = counted(status)
    assert (lost_steps(status), found.reached_step, found.began_step) == ([None, 40], 61, 61)


def test_nothing_is_lost_if_the_restored_step_is_newer_than_the_last_report() -> None:
    status = after_the_loss_of_all(101, restored=103)
    assert lost_steps(status) == [None, 0]
    assert (counted(status).lost_steps, counted(status).lost_ms) == (0, 0)


def test_second_loss_of_all_nodes_counts_the_steps_of_its_own_round() -> None:
    first = after_the_loss_of_all(101, restored=61)
    reached = status_of(at_step(70, START, ANEW, restored=61), first, later(1))
    third = history(3, "loss", final_at=later(9), join_ms=5, start_ms=600, first_step_ms=400)
    status = status_of(at_step(62, START, ANEW, third, restored=61), reached, later(11))
    assert lost_steps(status) == [None, 40, 9]
    assert counted(status).lost_steps == 49


def test_round_without_a_first_step_leaves_its_losses_to_the_next() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    broken = replace(ANEW, first_step_ms=None)
    failed = restarted(status_of(at_step(-1, START, broken, restored=61), trained, ago(30)))
    third = history(3, "loss", final_at=ago(9), start_ms=600, first_step_ms=400)
    status = status_of(at_step(62, START, broken, third, restored=61), failed)
    assert lost_steps(status) == [None, None, 40]


def test_lost_steps_in_the_record_take_precedence() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    status = status_of(at_step(101, START, LOSS, restored=99), trained)
    assert lost_steps(status) == [None, 1]
    assert (counted(status).lost_steps, counted(status).lost_ms) == (1, 200)


def test_round_of_unknown_begin_has_unknown_losses() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    status = status_of(at_step(102, START, ANEW, restored=-1), trained)
    assert lost_steps(status) == [None, None]
    found = counted(status)
    assert (found.lost_steps, found.reached_step, found.began_step) == (0, 102, None)


def silent(*rounds: History) -> RendezvousView:
    """Return a final round with a first step, whose members have not reported any progress."""
    found = view(*rounds)
    members = tuple(replace(one, step=-1, snapshots=None) for one in found.members)
    return replace(found, members=members)


def test_time_of_lost_steps_is_at_most_that_of_the_run() -> None:
    trained = restarted(status_of(at_step(1001, START, restored=0), at=ago(60)))
    short = history(
        2, "failure", final_at=ago(51), start_ms=600, first_step_ms=400, lost_steps=0, lost_ms=0
    )
    seen = restarted(status_of(at_step(1003, START, short, restored=1000), trained, ago(49)))
    gone = restarted(status_of(replace(view(START, short), members=()), seen, ago(20)))
    third = history(3, "loss", final_at=ago(11), join_ms=5, start_ms=600, first_step_ms=400)
    status = status_of(at_step(502, START, short, third, restored=501), gone, ago(9))
    found = counted(status)
    assert lost_steps(status) == [None, 0, 502]
    # The 30 s of round 2, and 499 of the 1000 steps that took 49 s before it.
    assert found.lost_ms == 30_000 + 49_000 * 499 // 1000
    whole = counted(status_of(at_step(1, START, short, third, restored=0), gone, ago(9)))
    assert (whole.lost_steps, whole.lost_ms) == (1003, 79_000), "all of 80 s less a pause of 1 s"


def test_all_time_of_a_round_is_lost_if_it_was_seen_at_its_first_step_only() -> None:
    trained = status_of(at_step(1, START), at=ago(99))
    gone = restarted(status_of(replace(view(START), members=()), trained, ago(50)))
    found = counted(status_of(at_step(1, START, ANEW), gone))
    assert (found.lost_steps, found.lost_ms) == (1, 50_000)


def test_loss_is_counted_with_a_report_after_the_first_step() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    first = status_of(silent(START, ANEW), trained, ago(40))
    assert (lost_steps(first), counted(first).counted_round) == ([None, None], 2)
    status = status_of(at_step(70, START, ANEW, restored=61), restarted(first), ago(35))
    found = counted(status)
    assert (lost_steps(status), found.lost_steps) == ([None, 40], 40)
    assert (found.reached_step, found.began_step, found.reached_round) == (70, 61, 2)
    again = counted(status_of(at_step(90, START, ANEW, restored=61), restarted(status), ago(30)))
    assert (again.lost_steps, again.reached_step) == (40, 90)
    third = history(3, "loss", final_at=ago(9), start_ms=600, first_step_ms=400)
    after = status_of(at_step(62, START, ANEW, third, restored=61), status)
    assert (lost_steps(after), counted(after).lost_steps) == ([None, 40, 9], 49)


def test_step_before_a_round_without_reports_is_not_lost_twice() -> None:
    trained = status_of(at_step(101, START), at=ago(51))
    known = replace(ANEW, lost_steps=40, lost_ms=8000)
    first = restarted(status_of(silent(START, known), trained, ago(40)))
    third = history(3, "loss", final_at=ago(9), start_ms=600, first_step_ms=400)
    status = status_of(at_step(62, START, known, third, restored=61), first)
    assert (lost_steps(status), counted(status).lost_steps) == ([None, 40, None], 40)


def test_steps_in_the_records_of_unseen_rounds_are_counted_once() -> None:
    trained = restarted(status_of(at_step(101, START), at=ago(51)))
    known = replace(ANEW, lost_steps=30, lost_ms=8000)
    third = history(3, "loss", final_at=ago(9), start_ms=600, first_step_ms=400)
    status = status_of(at_step(62, START, known, third, restored=61), trained)
    assert (lost_steps(status), counted(status).lost_steps) == ([None, 30, 10], 40)


def test_resumption_that_was_not_seen_counts_its_lost_steps_once() -> None:
    trained = restarted(status_of(at_step(101, START), at=ago(60)))
    begun = history(1, final_at=ago(41))
    opened = restarted(status_of(at_step(-1, begun, restored=61), trained, ago(40)))
    assert (counted(opened).reached_step, counted(opened).counted_round) == (101, 0)
    again = replace(begun, start_ms=600, first_step_ms=400)
    for before in (trained, opened):
        status = restarted(status_of(at_step(70, again, restored=61), before, ago(30)))
        found = counted(status)
        assert (lost_steps(status), found.lost_steps) == ([40], 40)
        assert (found.reached_step, found.began_step, found.counted_round) == (70, 61, 1)
        after = counted(status_of(at_step(80, again, restored=61), status))
        assert (after.lost_steps, after.reached_step) == (40, 80)


def test_total_follows_a_record_that_comes_after_the_first_look() -> None:
    first = after_the_loss_of_all(101, restored=61)
    record = replace(ANEW, lost_steps=45, lost_ms=9000)
    status = status_of(at_step(70, START, record, restored=61), restarted(first), later(1))
    assert (lost_steps(status), counted(status).lost_steps) == ([None, 45], 45)
    assert counted(status).lost_ms == 20_000, "the estimate stays"
    again = counted(status_of(at_step(71, START, record, restored=61), status, later(2)))
    assert (again.lost_steps, again.lost_ms) == (45, 20_000)
    unknown = status_of(silent(START, ANEW), status_of(at_step(101, START), at=ago(51)))
    late = counted(status_of(silent(START, record), restarted(unknown), later(1)))
    assert (late.lost_steps, late.lost_ms) == (45, 9000)


def test_steps_lost_in_a_suspension_count_for_the_next_run_without_their_time() -> None:
    trained = status_of(at_step(101, START), at=ago(1))
    spec: dict[str, Any] = {"runPolicy": {"suspend": True}}
    closed = replace(suspended(NOW), rounds=(START,), round=1)
    stopped = restarted(status_of(closed, trained, later(30), **spec))
    opened = replace(view(START), state=RendezvousState.JOINABLE, round=0, rounds=(), members=())
    waits = restarted(status_of(opened, stopped, later(100)))
    program = counted(trained).program
    assert program
    assert counted(waits) == SnapshotsStatus(reached_step=101, program=program)
    first = history(1, final_at=later(199), start_ms=600, first_step_ms=400)
    resumed = status_of(at_step(82, first, restored=81), waits, later(200))
    found = counted(resumed)
    assert lost_steps(resumed) == [20]
    assert (found.lost_steps, found.lost_ms, found.since) == (20, 0, later(200))
    # Without a report of a member there are no totals.
    unreported = status_of(silent(first), waits, later(200))
    assert counted(unreported) == counted(waits)
    assert counted(status_of(at_step(82, first, restored=81), unreported, later(201))) == (
        found.model_copy(update={"goodput_percent": 100})
    )
    # The steps of another program are not those of this one.
    other: dict[str, Any] = {"launch": "PerNode"}
    edited = status_of(opened, stopped, later(100), **other)
    assert edited.snapshots is None
    begun = status_of(at_step(1, first, restored=0), restarted(edited), later(200), **other)
    assert (lost_steps(begun), counted(begun).lost_steps) == ([None], 0)
    # An edit that comes with the suspension does not make the steps those of the new program.
    late = restarted(status_of(at_step(102, START), trained, **spec, **other))
    closing = restarted(status_of(closed, late, later(30), **spec, **other))
    assert status_of(opened, closing, later(100), **other).snapshots is None
