"""Save requests to a node's workers before a planned stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob.layout import Answer, Request
from elasticjob_agent.core.commands import (
    Exit,
    LogLine,
    Release,
    ReportLocal,
    RequestCheckpoint,
    StartGroup,
    StopGroup,
)
from elasticjob_agent.core.events import (
    DirectiveChanged,
    LeaveRequested,
    PortReserved,
    Timer,
    WorkersProgressed,
)
from elasticjob_agent.core.hang import hangs_at
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.step import wake_at
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import ASK_SECONDS
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Restore, Save
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.agent.builders import (
    FACTS,
    ME,
    Driven,
    ended,
    hello,
    roster,
    run,
    running,
    started,
    stop,
    stopped,
)

CAUSE = Cause(CauseKind.LEAVE, ("node-0",))


def directed(
    point: int | None = None, precedes_stop: bool = True, number: int = 1
) -> DirectiveChanged:
    save = None if point is None else Save(CAUSE, 25.0, point)
    return DirectiveChanged(Run(roster(number), ME, 3, save, precedes_stop))


def progressed(*points: int, answers_request: bool = False, **fields: Any) -> WorkersProgressed:
    workers = {
        rank: WorkerProgress(step=1, points=places, saves=True, **fields)
        for rank, places in enumerate(points)
    }
    return WorkersProgressed(1, workers, 0, answers_request)


def answered(*points: int, **fields: Any) -> WorkersProgressed:
    """Return progress that was read while a save request was in place."""
    return progressed(*points, answers_request=True, **fields)


def training(saves: bool = True) -> Driven:
    driven = running()
    driven.feed(directed())
    if saves:
        driven.feed(progressed(3, 4))
    return driven


def told(driven: Driven) -> Local:
    return driven.only(ReportLocal)[-1].local


def test_script_that_wants_to_save_is_reported_to_the_rendezvous() -> None:
    assert told(training()).saves
    assert not told(training(saves=False)).saves


def kept(*points: int, answers_request: bool = False, **fields: Any) -> WorkersProgressed:
    """Return progress of workers that keep their state in memory."""
    workers = {
        rank: WorkerProgress(step=1, points=places, keeps=True, **fields)
        for rank, places in enumerate(points)
    }
    return WorkersProgressed(1, workers, 0, answers_request)


def test_script_that_keeps_its_state_in_memory_is_reported_as_such() -> None:
    driven = training(saves=False)
    driven.feed(kept(3, 4))
    assert (told(driven).saves, told(driven).keeps) == (False, True)


@pytest.mark.parametrize("other", [{}, {1: WorkerProgress(step=1)}], ids=["no file", "reports"])
def test_worker_that_does_not_keep_its_state_leaves_the_node_without(
    other: dict[int, WorkerProgress],
) -> None:
    driven = training(saves=False)
    workers = {0: WorkerProgress(points=3, keeps=True), **other}
    driven.feed(WorkersProgressed(1, workers, 0, False))
    assert not told(driven).keeps


def test_state_kept_in_memory_completes_the_save_with_the_answer_alone() -> None:
    driven = training(saves=False)
    for event in (kept(3, 4), directed(0), kept(4, 5, answers_request=True), directed(6)):
        driven.feed(event)
    assert told(driven).passed == 5
    driven.feed(kept(7, 7, answer=Answer()))
    assert (told(driven).saved, told(driven).completed) == (False, False)
    driven.feed(kept(7, 7, answer=Answer(saved=6)))
    assert (told(driven).saved, told(driven).completed) == (False, True)


def test_leaving_agent_waits_for_the_request_to_keep_the_state() -> None:
    driven = training(saves=False)
    driven.feed(kept(3, 4))
    driven.feed(LeaveRequested("SIGTERM"))
    assert wake_at(driven.state) == pytest.approx(driven.now + ASK_SECONDS)


def saves(number: int, *resumed: bool, **fields: Any) -> WorkersProgressed:
    workers = {rank: WorkerProgress(resumed=each, **fields) for rank, each in enumerate(resumed)}
    return WorkersProgressed(number, workers, 0, False)


def second_round(*resumed: bool) -> Driven:
    """Return a state in which round 2 runs, after these reports of the workers of round 1."""
    driven = running()
    for event in (
        saves(1, *resumed), stop(), stopped(), PortReserved(4002), directed(number=2), started(2)
    ):  # fmt: skip
        driven.feed(event)
    return driven


@pytest.mark.parametrize(
    ("resumed", "first", "second"),
    [
        ((), Restore.NONE, Restore.NONE),
        ((True,), Restore.NONE, Restore.NONE),
        ((True, False), Restore.NONE, Restore.NONE),
        ((True, True), Restore.DONE, Restore.PENDING),
    ],
)
def test_node_restores_after_a_round_whose_workers_all_saved(
    resumed: tuple[bool, ...], first: Restore, second: Restore
) -> None:
    driven = running()
    driven.feed(saves(1, *resumed))
    assert told(driven).restore is first
    driven = second_round(*resumed)
    assert told(driven).restore is second
    driven.feed(saves(2, True))
    assert told(driven).restore is second, "one worker has not saved"
    driven.feed(saves(2, True, True))
    assert told(driven).restore is Restore.DONE


def test_resume_that_is_read_with_an_exit_or_by_the_next_agent_counts() -> None:
    progress = dict.fromkeys((0, 1), WorkerProgress(resumed=True))
    driven = Driven(replace(hello(running=1), progress=progress))
    assert told(driven).restore is Restore.DONE
    driven = running()
    driven.feed(replace(ended(code=1), progress=progress))
    assert driven.state.group is not None
    assert driven.state.group.resumed_at is not None


def test_round_that_ended_before_its_restore_leaves_the_next_one_to_restore() -> None:
    driven = second_round(True, True)
    for event in (stop(2), stopped(2), PortReserved(4003), directed(number=3), started(3)):
        driven.feed(event)
    assert told(driven).restore is Restore.PENDING


def test_workers_of_leaving_node_run_until_they_restored_and_were_asked() -> None:
    driven = second_round(True, True)
    lines = [line.text for line in driven.only(LogLine, driven.feed(LeaveRequested("SIGTERM")))]
    assert lines[0] == "leaving: SIGTERM"
    assert "run on until all nodes have restored" in lines[1]
    at = wake_at(driven.state)
    assert at is None or at > driven.now + ASK_SECONDS
    driven.feed(Timer(), after=10.0)
    assert not driven.only(StopGroup, driven.commands[-3:])
    driven.feed(saves(2, True, True, keeps=True))
    assert wake_at(driven.state) == pytest.approx(driven.now + ASK_SECONDS)
    assert driven.only(StopGroup, driven.feed(Timer(), after=ASK_SECONDS))


def test_workers_of_leaving_node_that_hold_their_state_stop_once_restored() -> None:
    driven = second_round(True, True)
    driven.feed(LeaveRequested("SIGTERM"))
    assert driven.only(StopGroup, driven.feed(saves(2, True, True), after=10.0))


def test_urgent_leave_does_not_wait_for_the_restore() -> None:
    driven = second_round(True, True)
    driven.feed(LeaveRequested("SIGTERM"))
    commands = driven.feed(LeaveRequested("SIGTERM", hurry=True))
    assert driven.only(StopGroup, commands)
    assert not any("restored" in line.text for line in driven.only(LogLine, commands))


def test_stop_without_request_to_workers_that_keep_their_state_is_not_logged() -> None:
    driven = training(saves=False)
    driven.feed(kept(3, 4))
    lines = [line.text for line in driven.only(LogLine, driven.feed(stop(kind=CauseKind.LEAVE)))]
    assert not any("without the checkpoint" in line for line in lines), lines


def test_each_save_request_is_forwarded_once() -> None:
    driven = training()
    assert driven.only(RequestCheckpoint, driven.feed(directed(0))) == [
        RequestCheckpoint(1, Request(0, 25.0))
    ]
    assert driven.only(RequestCheckpoint, driven.feed(progressed(4, 4))) == []
    assert driven.only(RequestCheckpoint, driven.feed(directed(9))) == [
        RequestCheckpoint(1, Request(9, 25.0))
    ]
    assert driven.only(RequestCheckpoint, driven.feed(directed(9))) == []


def test_answer_is_first_progress_read_after_the_request_was_written() -> None:
    driven = training()
    driven.feed(directed(0))
    driven.feed(progressed(4, 5))
    assert told(driven).passed == -1, "this may have been read before"
    driven.feed(answered(5, 6))
    assert told(driven).passed == 6
    driven.feed(answered(6, 6))
    assert told(driven).passed == 6


def test_group_has_saved_when_all_passed_the_step_or_one_reports_a_checkpoint() -> None:
    driven = training()
    for event in (
        directed(0),
        answered(4, 5),
        directed(6),
        progressed(7, 6),
    ):
        driven.feed(event)
    assert (told(driven).saved, told(driven).completed) == (False, False)
    driven.feed(progressed(7, 7))
    assert (told(driven).saved, told(driven).completed) == (True, False)
    driven.feed(progressed(7, 7, checkpoint_step=7, checkpoints=1))
    assert told(driven).completed


def test_checkpoint_before_requested_step_does_not_complete_the_save() -> None:
    driven = training()
    for event in (directed(0), answered(4, 5), directed(9)):
        driven.feed(event)
    driven.feed(progressed(6, 6, checkpoint_step=6, checkpoints=1))
    assert not told(driven).completed


def test_checkpoint_up_to_the_answer_does_not_complete_the_save() -> None:
    """The progress at the request is up to a quarter of a second older than the request."""
    driven = training()
    driven.feed(progressed(4, 4, checkpoint_step=2))
    driven.feed(directed(0))
    driven.feed(answered(5, 5, checkpoint_step=5))
    driven.feed(directed(6))
    driven.feed(progressed(7, 6, checkpoint_step=5))
    assert not told(driven).completed
    driven.feed(progressed(7, 6, checkpoint_step=6))
    assert told(driven).completed


POINT = 6
EARLIER = WorkerProgress(step=10, points=5, saves=True, checkpoint_step=5, checkpoints=1)
"""Progress at the request: the worker has reported the checkpoint of step 5."""
PERIODIC = replace(EARLIER, checkpoint_step=10, checkpoints=2)
"""The same worker after a periodic checkpoint that it reports before the point."""


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param(EARLIER, PERIODIC, False, id="periodic before the point"),
        pytest.param(EARLIER, replace(PERIODIC, points=POINT), False, id="it saves at the point"),
        pytest.param(
            EARLIER,
            replace(EARLIER, points=POINT + 1, checkpoint_step=11, checkpoints=2),
            True,
            id="it reports and waits for the stop",
        ),
        pytest.param(
            EARLIER,
            replace(PERIODIC, points=POINT, answer=Answer(saved=POINT - 1)),
            False,
            id="the report of an earlier point, at the point",
        ),
        pytest.param(
            EARLIER,
            replace(PERIODIC, points=POINT + 1, answer=Answer(saved=POINT - 1)),
            False,
            id="the report of an earlier point, while another rank reports the save",
        ),
        pytest.param(
            EARLIER,
            replace(PERIODIC, points=POINT, answer=Answer(saved=POINT)),
            True,
            id="the report of this point",
        ),
        pytest.param(
            replace(EARLIER, points=POINT + 1, checkpoint_step=10),
            replace(EARLIER, points=POINT + 1, checkpoint_step=10),
            True,
            id="saved before this agent took over",
        ),
        pytest.param(
            replace(EARLIER, points=POINT + 1, checkpoint_step=10, answer=Answer(saved=3)),
            replace(EARLIER, points=POINT + 1, checkpoint_step=10, answer=Answer(saved=3)),
            False,
            id="it reports each tenth step, and this agent took over",
        ),
        pytest.param(
            replace(EARLIER, points=POINT + 1, step=-1, answer=Answer(saved=POINT)),
            replace(EARLIER, points=POINT + 1, step=-1, answer=Answer(saved=POINT)),
            True,
            id="it reports no steps, and this agent took over",
        ),
        pytest.param(
            replace(EARLIER, points=0, saved_ns=1),
            replace(EARLIER, points=0, saved_ns=2),
            True,
            id="text form",
        ),
        pytest.param(
            replace(EARLIER, answer=Answer(), saved_ns=1),
            replace(EARLIER, points=POINT + 1, answer=Answer(), saved_ns=2),
            True,
            id="checkpoint-only file beside points",
        ),
    ],
)
def test_only_a_report_of_the_requested_checkpoint_completes_the_save(
    before: WorkerProgress, now: WorkerProgress, expected: bool
) -> None:
    driven = running()
    for event in (directed(), directed(POINT)):
        driven.feed(event)
    driven.feed(WorkersProgressed(1, {0: before}, 0, answers_request=True))
    driven.feed(WorkersProgressed(1, {0: now}, 0))
    assert told(driven).completed is expected


FULL = "rank 1: /checkpoints: No space left on device"


def failed_at(*points: int) -> WorkersProgressed:
    """Return progress of workers whose saves failed at these points; 0 for none."""
    answers = [Answer(failed=point, error=FULL if point else "") for point in points]
    workers = {
        rank: WorkerProgress(step=1, points=POINT + 1, saves=True, reports=True, answer=answer)
        for rank, answer in enumerate(answers)
    }
    return WorkersProgressed(1, workers, 0)


@pytest.mark.parametrize(
    ("points", "expected"),
    [((POINT, POINT), FULL), ((POINT, 0), ""), ((POINT - 1, POINT - 1), ""), ((0, 0), "")],
)
def test_save_has_failed_once_all_workers_report_it(points: tuple[int, ...], expected: str) -> None:
    driven = training()
    for event in (directed(0), answered(4, 5), directed(POINT), failed_at(*points)):
        driven.feed(event)
    local = told(driven)
    assert (local.save_error, local.saved, local.completed) == (expected, False, False)


@pytest.mark.parametrize(
    ("points", "error", "saved"),
    [((POINT, 0), FULL, False), ((POINT, POINT), FULL, False), ((0, POINT), "", False)],
)
def test_worker_that_ended_is_not_waited_for_to_report_a_failed_save(
    points: tuple[int, ...], error: str, saved: bool
) -> None:
    driven = training()
    for event in (directed(0), answered(4, 5), directed(POINT), failed_at(*points)):
        driven.feed(event)
    driven.feed(replace(ended(1, code=0), progress=failed_at(*points).progress))
    local = told(driven)
    assert (local.save_error, local.saved) == (error, saved)


def test_workers_that_end_after_a_failed_save_have_not_saved() -> None:
    driven = training()
    last = failed_at(POINT, POINT)
    for event in (directed(0), answered(4, 5), directed(POINT), last):
        driven.feed(event)
    for end in (replace(ended(0), progress=last.progress), ended(1), stopped()):
        driven.feed(end)
    local = told(driven)
    assert (local.save_error, local.saved, local.done) == (FULL, False, False)


def test_stop_after_a_failed_save_names_the_error_of_the_storage() -> None:
    driven = training()
    for event in (directed(0), answered(4, 5), directed(POINT), failed_at(POINT, POINT)):
        driven.feed(event)
    [line] = driven.only(LogLine, driven.feed(stop(kind=CauseKind.LEAVE, grace=3.0)))[1:]
    assert line.text == f"round 1 stops without a checkpoint in storage: {FULL}"
    assert line.warning


def test_worker_that_reports_checkpoints_has_saved_only_after_its_checkpoint() -> None:
    driven = running()
    driven.feed(directed())
    driven.feed(progressed(3, 3, checkpoint_step=2, checkpoints=1))
    for event in (
        directed(0),
        answered(4, 4, checkpoint_step=2, checkpoints=1),
    ):
        driven.feed(event)
    driven.feed(directed(5))
    driven.feed(progressed(6, 6, checkpoint_step=2, checkpoints=1))
    assert (told(driven).saved, told(driven).completed) == (False, False)


def test_worker_that_reports_this_checkpoint_has_not_saved_without_a_report() -> None:
    driven = running()
    for event in (directed(), progressed(3, 3, reports=True), directed(0)):
        driven.feed(event)
    driven.feed(answered(4, 4, reports=True))
    driven.feed(directed(5))
    driven.feed(progressed(6, 6, reports=True))
    assert (told(driven).saved, told(driven).completed) == (False, False)
    driven.feed(progressed(6, 6, checkpoint_step=6, checkpoints=1, reports=True))
    assert told(driven).completed


def test_ended_worker_is_not_waited_for() -> None:
    driven = training()
    for event in (
        directed(0),
        answered(4, 5),
        directed(6),
        progressed(7, 5),
    ):
        driven.feed(event)
    driven.feed(ended(1, code=0))
    assert told(driven).saved


def asked_to_end(*points: int) -> Driven:
    """End the workers with 0 after these places, of which the fifth is the common save point."""
    driven = training()
    for event in (directed(0), answered(4, 4), directed(5)):
        driven.feed(event)
    last = progressed(*points).progress
    for end in (replace(ended(0), progress=last), ended(1), stopped()):
        driven.feed(end)
    return driven


def test_worker_that_ends_after_saving_is_not_done_and_waits_for_round_end() -> None:
    driven = asked_to_end(5, 5)
    local = told(driven)
    assert (local.done, local.workers, local.saved) == (False, Workers.RUNNING, True)
    driven.feed(stop(kind=CauseKind.JOIN))
    local = told(driven)
    assert (local.done, local.workers, local.round) == (False, Workers.NONE, 1)
    driven.feed(run(2))
    assert len(driven.only(StartGroup)) == 2


def test_worker_that_ends_before_requested_step_is_done() -> None:
    local = told(asked_to_end(4, 4))
    assert (local.done, local.workers) == (True, Workers.NONE)


def test_worker_that_ends_at_requested_step_is_done_if_round_does_not_end() -> None:
    driven = asked_to_end(5, 5)
    assert wake_at(driven.state) is not None
    driven.feed(Timer(), after=25.0)
    local = told(driven)
    assert (local.done, local.workers) == (True, Workers.NONE)


@pytest.mark.parametrize("hurry", [False, True])
def test_leaving_agent_with_ended_workers_waits_for_peers_unless_hurried(hurry: bool) -> None:
    driven = asked_to_end(5, 5)
    driven.feed(LeaveRequested("SIGTERM", hurry=hurry))
    driven.feed(Timer(), after=20.0)
    assert bool(driven.only(Exit) or driven.only(Release)) == hurry
    driven.feed(stop(kind=CauseKind.LEAVE))
    assert told(driven).workers is Workers.NONE


def test_program_without_steps_that_ends_after_request_is_not_done() -> None:
    driven = training()
    driven.feed(progressed(0, 0, saved_ns=5))
    for event in (directed(0), answered(0, 0, saved_ns=5), directed(1)):
        driven.feed(event)
    for end in (ended(0), ended(1), stopped()):
        driven.feed(end)
    assert not told(driven).done


def test_rewritten_file_counts_as_checkpoint() -> None:
    driven = training()
    driven.feed(progressed(0, 0, saved_ns=5))
    driven.feed(directed())
    driven.feed(answered(0, 0, saved_ns=5))
    driven.feed(directed(1))
    driven.feed(progressed(0, 0, saved_ns=5))
    assert (told(driven).saved, told(driven).completed) == (False, False)
    driven.feed(progressed(0, 0, saved_ns=6))
    assert told(driven).completed


def test_reported_checkpoint_counts_by_its_step() -> None:
    driven = running()
    driven.feed(directed())
    text = WorkerProgress(step=9, checkpoint_step=5, saves=True)
    driven.feed(WorkersProgressed(1, {0: text}, 0))
    for event in (
        directed(0),
        WorkersProgressed(1, {0: text}, 0, answers_request=True),
        directed(1),
    ):
        driven.feed(event)
    assert not told(driven).completed
    driven.feed(WorkersProgressed(1, {0: replace(text, checkpoint_step=9)}, 0))
    assert told(driven).completed


# -- leaving nodes ------------------------------------------------------------------


def test_workers_of_leaving_member_run_until_saved() -> None:
    driven = training()
    assert driven.only(StopGroup, driven.feed(LeaveRequested("SIGTERM"))) == []
    assert told(driven).leaving == "SIGTERM"
    driven.feed(directed(0), after=0.3)
    assert driven.only(StopGroup, driven.feed(Timer(), after=10)) == []
    assert driven.only(StopGroup, driven.feed(stop(kind=CauseKind.LEAVE, grace=3.0))) == [
        StopGroup(1, 3.0, copies=False, ends_step=True)
    ]


def test_leaving_agent_waits_at_most_ask_seconds_for_save_request() -> None:
    driven = training()
    driven.feed(LeaveRequested("SIGTERM"))
    assert wake_at(driven.state) == pytest.approx(driven.now + ASK_SECONDS)
    stops = driven.only(StopGroup, driven.feed(Timer(), after=ASK_SECONDS))
    assert stops == [StopGroup(1, 7.0, copies=False, ends_step=True)]


@pytest.mark.parametrize("why", ["does not save", "nobody asks", "urgent"])
def test_leaving_agent_stops_at_once_without_save_request(why: str) -> None:
    driven = training(saves=why != "does not save")
    if why == "nobody asks":
        driven.feed(directed(precedes_stop=False))
    stops = driven.only(StopGroup, driven.feed(LeaveRequested("SIGINT", hurry=why == "urgent")))
    assert len(stops) == 1


def test_workers_waiting_for_stop_are_not_a_hang() -> None:
    driven = Driven(hello(running=1), facts=replace(FACTS, hang_seconds=1.0))
    driven.feed(directed())
    driven.feed(progressed(3, 4))
    assert hangs_at(driven.state) is not None
    driven.feed(directed(0))
    assert hangs_at(driven.state) is None


def test_loss_stops_workers_with_save_request_at_once() -> None:
    driven = training()
    driven.feed(directed(0))
    assert driven.only(StopGroup, driven.feed(stop(kind=CauseKind.LOSS))) == [StopGroup(1, 0.0)]


def test_returning_agent_repeats_save_request() -> None:
    driven = Driven(hello(running=1))
    assert driven.only(RequestCheckpoint, driven.feed(directed(5))) == [
        RequestCheckpoint(1, Request(5, 25.0))
    ]


@pytest.mark.parametrize(
    ("saves", "precedes_stop", "requested", "kind", "said"),
    [
        (True, True, False, CauseKind.JOIN, True),
        (True, True, False, CauseKind.LOSS, False),
        (True, True, True, CauseKind.JOIN, False),
        (True, False, False, CauseKind.JOIN, False),
        (False, True, False, CauseKind.JOIN, False),
    ],
    ids=["not-requested", "lost", "requested", "never-requested", "wants-none"],
)
def test_stop_without_possible_checkpoint_is_logged(
    saves: bool, precedes_stop: bool, requested: bool, kind: CauseKind, said: bool
) -> None:
    driven = running()
    driven.feed(directed(9 if requested else None, precedes_stop))
    driven.feed(progressed(3, 4) if saves else WorkersProgressed(1, {0: WorkerProgress(1)}, 0))
    notes = driven.only(LogLine, driven.feed(stop(kind=kind)))
    assert any("without the checkpoint" in note.text for note in notes) is said
