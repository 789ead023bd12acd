"""Agent's decisions: the commands that follow each fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_agent.core.commands import (
    Exit,
    LogLine,
    Release,
    ReportLocal,
    ReservePort,
    StartGroup,
    StopGroup,
)
from elasticjob_agent.core.events import (
    Event,
    LeaveRequested,
    PortReserved,
    RuntimeEvent,
    Timer,
    WorkersProgressed,
)
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.state import LEFTOVER_SECONDS, ExitCode
from elasticjob_agent.core.step import wake_at
from elasticjob_agent.worker_runtime import (
    Hello,
    LauncherSignalled,
    LogTrouble,
    StartRefused,
    WorkerExited,
    WorkerRuntimeLost,
    WorkersStuck,
)
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Idle, Left, Refused, Run
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import CauseKind, Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.agent.builders import (
    ME,
    Driven,
    directed,
    ended,
    finish,
    hello,
    ready,
    roster,
    run,
    running,
    started,
    stop,
    stopped,
)


def told(driven: Driven) -> Local:
    return driven.only(ReportLocal)[-1].local


def replace_rank(ended_: RuntimeEvent) -> RuntimeEvent:
    """Return the same exit for the other worker."""
    assert isinstance(ended_.event, WorkerExited)
    return RuntimeEvent(replace(ended_.event, local_rank=1))


# -- before the first round ---------------------------------------------------------


def test_agent_is_ready_only_with_launcher_and_port() -> None:
    driven = Driven()
    commands = driven.feed(hello())
    assert ReservePort() in commands
    assert told(driven) == Local(ready=False)
    driven.feed(PortReserved(4000))
    assert told(driven) == Local(ready=True, master_port=4000)


@pytest.mark.parametrize(
    "event",
    [directed(Idle("registering")), stop(1), run(1, mine=False)],
    ids=["idle", "stop", "no seat"],
)
def test_workers_start_only_with_rank_assignment_in_final_round(event: Event) -> None:
    driven = ready()
    assert not driven.only(StartGroup, driven.feed(event))


def test_round_is_started_once_and_reported_as_it_starts() -> None:
    driven = ready()
    assert len(driven.only(StartGroup, driven.feed(run(3)))) == 1
    assert told(driven) == Local(ready=True, workers=Workers.STARTING, round=3, master_port=4000)
    driven.feed(PortReserved(4001))
    assert not driven.feed(run(3, restarts=0)), "the same directive again changes nothing"
    driven.feed(started(3), after=0.3)
    assert told(driven).workers is Workers.RUNNING
    assert told(driven).master_port == 4001, "the next round has a port of its own"
    assert told(driven).start_ms == pytest.approx(500, abs=2)


def test_new_round_starts_after_previous_workers_ended() -> None:
    driven = running(1)
    commands = driven.feed(run(2))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0)]
    assert not driven.only(StartGroup, commands)
    assert driven.only(StartGroup, driven.feed(stopped(1)))[0].roster.number == 2


@pytest.mark.parametrize("number", [1, 2])
def test_older_or_same_round_never_starts_again(number: int) -> None:
    driven = running(2)
    driven.feed(stop(2))
    driven.feed(stopped(2))
    assert not driven.only(StartGroup, driven.feed(run(number)))


# -- stopping -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "grace"),
    [
        (CauseKind.LOSS, 0.0),
        (CauseKind.FAILURE, 0.0),
        (CauseKind.JOIN, 10.0),
        (CauseKind.LEAVE, 10.0),
        (CauseKind.SCALE_DOWN, 10.0),
    ],
)
def test_urgent_cause_kills_workers_and_planned_cause_gives_grace(
    kind: CauseKind, grace: float
) -> None:
    driven = running()
    assert driven.only(StopGroup, driven.feed(stop(1, kind))) == [
        StopGroup(1, grace, ends_step=grace > 0)
    ]
    assert told(driven).workers is Workers.STOPPING
    driven.feed(stopped())
    assert told(driven).workers is Workers.NONE
    assert told(driven).round == 1


def test_stop_can_be_shortened_but_not_extended_or_repeated() -> None:
    driven = running()
    driven.feed(stop(1, CauseKind.JOIN))
    assert not driven.only(StopGroup, driven.feed(stop(1, CauseKind.JOIN, grace=20.0)))
    assert driven.only(StopGroup, driven.feed(stop(1, CauseKind.LOSS))) == [StopGroup(1, 0.0)]
    assert not driven.only(StopGroup, driven.feed(stop(1, CauseKind.JOIN)))


def test_stop_of_another_round_is_ignored() -> None:
    driven = running(5)
    assert not driven.only(StopGroup, driven.feed(stop(4)))


def test_idle_directive_keeps_workers_running() -> None:
    assert not running().feed(directed(Idle("workers are running; reading their roster")))[1:]


@pytest.mark.parametrize(
    "exit_",
    [ended(code=143), ended(signum=15), ended(signum=9), ended(code=1), ended(code=0)],
    ids=["143", "SIGTERM", "SIGKILL", "1", "0"],
)
@pytest.mark.parametrize("kind", [CauseKind.JOIN, CauseKind.LOSS, CauseKind.FAILURE])
def test_exit_during_stop_is_no_failure(exit_: RuntimeEvent, kind: CauseKind) -> None:
    driven = running()
    for event in (stop(1, kind), exit_, replace_rank(exit_), stopped()):
        driven.feed(event)
    assert told(driven).failure is None
    assert not told(driven).done


# -- exits of workers ---------------------------------------------------------------


def test_successful_workers_are_done_when_no_process_is_left() -> None:
    driven = running()
    driven.feed(ended(0))
    driven.feed(ended(1))
    assert told(driven).workers is Workers.RUNNING
    assert not told(driven).done
    driven.feed(stopped())
    assert told(driven).workers is Workers.NONE
    assert told(driven).done


def test_leftover_processes_are_stopped_after_a_delay() -> None:
    driven = running()
    driven.feed(ended(0))
    driven.feed(ended(1))
    assert wake_at(driven.state) == pytest.approx(driven.now + LEFTOVER_SECONDS)
    assert driven.only(StopGroup, driven.feed(Timer(), after=0.21)) == [StopGroup(1, 7.0)]
    driven.feed(stopped())
    assert told(driven).done


def test_first_failure_kills_other_workers_and_is_reported_at_once() -> None:
    driven = running()
    commands = driven.feed(ended(1, code=3, stderr="ValueError: x"))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0)]
    failure = told(driven).failure
    assert failure is not None
    assert (failure.rank, failure.local_rank, failure.exit_code) == (3, 1, 3)
    assert (failure.member, failure.name, failure.node) == ("uid-1", "node-1", "rack-a")
    driven.feed(ended(0, signum=9))
    driven.feed(stopped())
    assert told(driven).failure == failure
    assert not told(driven).done


def test_failure_reports_run_duration_and_last_step() -> None:
    """The last progress comes with the exit: the file is polled only now and then."""
    driven = running(1)
    driven.feed(WorkersProgressed(1, {0: WorkerProgress(step=3)}, 0), after=20)
    words = {0: WorkerProgress(step=9), 1: WorkerProgress(step=8)}
    driven.feed(replace(ended(0, code=1), progress=words), after=10)
    failure = told(driven).failure
    assert failure is not None
    assert (failure.step, failure.ran_ms) == (9, 30_000)
    driven.feed(ended(1, signum=9), after=1)
    failure = told(driven).failure
    assert failure is not None
    assert failure.ran_ms == 30_000, "what ended later does not move it"


def test_workers_ended_by_launcher_without_agent_did_not_fail() -> None:
    gone = ended(0, signum=9).event
    assert isinstance(gone, WorkerExited)
    driven = Driven(hello(None, replace(gone, unasked=True), base_rank=2), PortReserved(4000))
    assert told(driven).failure is None
    assert told(driven).round == gone.round
    hung = running(1)
    hung.feed(RuntimeEvent(replace(gone, unasked=True)))
    assert told(hung).failure is None


def test_round_cut_off_by_the_launcher_is_reported_until_another_one_is() -> None:
    gone = ended(0, signum=9).event
    assert isinstance(gone, WorkerExited)
    driven = running(1)
    for rank in range(2):
        driven.feed(RuntimeEvent(replace(gone, local_rank=rank, unasked=True)))
    assert told(driven).cut_off_round == 0, "not all of its processes have ended"
    driven.feed(stopped())
    assert (told(driven).cut_off_round, told(driven).workers) == (1, Workers.NONE)
    driven.feed(run(2))
    driven.feed(started(2))
    assert told(driven).cut_off_round == 1
    driven.feed(stop(2, CauseKind.JOIN))
    driven.feed(ended(0, signum=15, number=2))
    driven.feed(stopped(2))
    assert told(driven).cut_off_round == 1, "the second round was stopped by order"


def test_run_duration_of_adopted_workers_is_unknown() -> None:
    gone = ended(0, code=1).event
    assert isinstance(gone, WorkerExited)
    driven = Driven(hello(3, gone, base_rank=2), PortReserved(4000))
    failure = told(driven).failure
    assert failure is not None
    assert (failure.step, failure.ran_ms) == (None, None)


def test_run_duration_of_workers_that_never_started_is_zero() -> None:
    driven = ready()
    driven.feed(run(2))
    driven.feed(RuntimeEvent(StartRefused(2, "no such file")), after=5)
    failure = told(driven).failure
    assert failure is not None
    assert failure.ran_ms == 0


def test_aborted_collective_is_reported_only_without_local_cause() -> None:
    lost = "RuntimeError: gloo/transport/tcp/pair.cc: Connection closed by peer [::1]"
    raised = "Traceback (most recent call last):\n  File\nValueError: x"
    driven = running()
    commands = driven.feed(ended(0, code=1, stderr=lost))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0)], "the rest is killed at once"
    assert told(driven).failure is None
    driven.feed(ended(1, signum=9, stderr=raised))
    driven.feed(stopped())
    failure = told(driven).failure
    assert failure is not None
    assert (failure.local_rank, failure.kind) == (1, FailureClass.USER_ERROR)


def test_new_round_resets_worker_state() -> None:
    driven = running()
    for event in (ended(1, code=3), ended(0, signum=9), stopped(), run(2), started(2)):
        driven.feed(event)
    assert told(driven).failure is None
    assert (told(driven).workers, told(driven).round) == (Workers.RUNNING, 2)


def test_success_in_one_round_does_not_count_in_the_next() -> None:
    driven = running()
    for event in (ended(0), ended(1), stopped(), run(2)):
        driven.feed(event)
    assert not told(driven).done
    assert told(driven).round == 2


def test_refused_start_is_launch_failure() -> None:
    driven = ready()
    driven.feed(run(2))
    driven.feed(RuntimeEvent(StartRefused(2, "processes of round 1 are left")))
    failure = told(driven).failure
    assert failure is not None
    assert failure.kind is FailureClass.LAUNCH_ERROR
    assert told(driven).workers is Workers.NONE


@pytest.mark.parametrize(
    "event",
    [ended(0, code=1, number=7), started(7), stopped(7), RuntimeEvent(LogTrouble("disk full"))],
)
def test_event_of_another_round_is_ignored(event: Event) -> None:
    driven = running()
    before = driven.state
    commands = driven.feed(event)
    assert driven.state == before
    assert all(isinstance(command, LogLine) for command in commands)


# -- leaving ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [LeaveRequested("SIGTERM"), RuntimeEvent(LauncherSignalled(15))],
    ids=["agent", "launcher"],
)
def test_leave_is_reported_at_once_and_gives_workers_grace(event: Event) -> None:
    driven = running()
    commands = driven.feed(event)
    assert driven.only(StopGroup, commands) == [StopGroup(1, 7.0, copies=False, ends_step=True)]
    assert told(driven).leaving
    assert told(driven).workers is Workers.STOPPING
    driven.feed(ended(0, signum=15))
    driven.feed(ended(1, signum=15))
    driven.feed(stopped())
    assert told(driven).failure is None
    assert driven.only(Release, driven.feed(directed(Left())))[0].exit_code == 143
    ending = driven.only(Exit, driven.feed(RuntimeEvent(WorkerRuntimeLost("released"))))[0].ending
    assert ending.code is ExitCode.OK


def test_leaving_node_starts_no_workers() -> None:
    driven = ready()
    driven.feed(LeaveRequested("SIGTERM"))
    assert not driven.only(StartGroup, driven.feed(run(1)))


def test_leave_before_launcher_connected_ends_at_once() -> None:
    driven = Driven()
    ending = driven.only(Exit, driven.feed(LeaveRequested("SIGTERM")))[0].ending
    assert ending.code is ExitCode.OK


def test_leave_ends_without_etcd() -> None:
    driven = running()
    driven.feed(LeaveRequested("SIGTERM"))
    assert wake_at(driven.state) is None, "not before the workers are gone"
    driven.feed(stopped())
    due = wake_at(driven.state)
    assert due is not None
    assert not driven.only(Release, driven.feed(Timer(), after=1.0))
    assert driven.only(Release, driven.feed(Timer(), after=due - driven.now + 0.01))


def test_second_interrupt_skips_grace() -> None:
    driven = running()
    driven.feed(LeaveRequested("SIGINT"))
    commands = driven.feed(LeaveRequested("SIGINT", hurry=True))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0, copies=False)]


@pytest.mark.parametrize(
    "end",
    [finish(), directed(Left()), directed(Refused("no"))],
    ids=["finish", "left", "refused"],
)
def test_leave_request_after_the_end_is_ignored(end: Event) -> None:
    driven = ready()
    driven.feed(end)
    driven.feed(LeaveRequested("SIGTERM"))
    driven.feed(RuntimeEvent(LauncherSignalled(15)))
    assert not told(driven).leaving


# -- the launcher -------------------------------------------------------------------


def test_lost_launcher_fails_the_member_and_makes_it_leave() -> None:
    driven = running()
    driven.feed(RuntimeEvent(WorkerRuntimeLost("signal 9")))
    local = told(driven)
    assert (local.ready, local.workers) == (False, Workers.NONE)
    assert "signal 9" in local.leaving
    assert local.failure is not None
    assert local.failure.kind is FailureClass.SIGNAL
    ending = driven.only(Exit, driven.feed(directed(Left())))[0].ending
    assert ending.code is ExitCode.FAILED


STUCK = RuntimeEvent(WorkersStuck(1, "process 7 waits"))


def test_node_with_stuck_workers_leaves_and_releases_its_launcher() -> None:
    driven = running()
    driven.feed(stop(1, CauseKind.FAILURE))
    driven.feed(STUCK)
    local = told(driven)
    assert (local.workers, local.leaving) == (Workers.NONE, "process 7 waits")
    assert not driven.only(StartGroup, driven.feed(run(2)))
    released = driven.only(Release, driven.feed(directed(Left())))[0]
    assert "left (process 7 waits)" in released.message
    ending = driven.only(Exit, driven.feed(RuntimeEvent(WorkerRuntimeLost("released"))))[0].ending
    assert ending.code is ExitCode.STUCK


def test_leaving_node_names_its_stuck_workers() -> None:
    driven = running()
    driven.feed(LeaveRequested("SIGTERM"))
    driven.feed(STUCK)
    assert told(driven).leaving == "SIGTERM; process 7 waits"
    driven.feed(STUCK)
    assert told(driven).leaving == "SIGTERM; process 7 waits"


def test_stuck_workers_do_not_delay_the_end_of_the_job() -> None:
    driven = running()
    driven.feed(finish(OutcomeKind.STOPPED))
    assert not driven.only(Release)
    [release] = driven.only(Release, driven.feed(STUCK))
    assert release.message.endswith("; process 7 waits")
    ending = driven.only(Exit, driven.feed(RuntimeEvent(WorkerRuntimeLost("released"))))[0].ending
    assert ending.code is ExitCode.STUCK, "the operator explains the pod that does not end"


def test_next_agent_leaves_because_of_stuck_workers() -> None:
    event = hello().event
    assert isinstance(event, Hello)
    driven = Driven(RuntimeEvent(replace(event, stuck="process 7 waits")), PortReserved(4000))
    assert told(driven).leaving == "process 7 waits"
    assert not driven.only(StartGroup, driven.feed(run(2)))


def test_launcher_that_ends_during_leave_has_not_failed() -> None:
    driven = running()
    driven.feed(RuntimeEvent(LauncherSignalled(15)))
    driven.feed(RuntimeEvent(WorkerRuntimeLost("exit code 143")))
    assert told(driven).failure is None
    driven.feed(directed(Left()))
    assert driven.only(Exit)


def test_returning_agent_adopts_running_workers() -> None:
    driven = Driven(hello(running=4, base_rank=2), PortReserved(4000))
    assert told(driven) == Local(ready=True, workers=Workers.RUNNING, round=4, master_port=4000)
    assert not driven.only(StartGroup, driven.feed(run(4)))
    assert not driven.only(StopGroup)


def test_returning_agent_reports_missed_failure() -> None:
    missed = ended(1, code=1, number=4, stderr="KeyError: 'x'").event
    driven = Driven(hello(4, missed, base_rank=2), PortReserved(4000))  # type: ignore[arg-type]
    failure = told(driven).failure
    assert failure is not None
    assert (failure.round, failure.rank) == (4, 3)
    assert driven.only(StopGroup) == [StopGroup(4, 0.0)]


def test_returning_agent_reports_missed_success() -> None:
    exits = [ended(rank, number=4).event for rank in (0, 1)]
    driven = Driven(hello(None, *exits), PortReserved(4000))  # type: ignore[arg-type]
    assert told(driven).done
    assert (told(driven).workers, told(driven).round) == (Workers.NONE, 4)


def test_ranks_of_adopted_worker_group_come_from_its_roster() -> None:
    driven = Driven(hello(running=4), PortReserved(4000), run(4), ended(1, code=1, number=4))
    failure = told(driven).failure
    assert failure is not None
    assert failure.rank == 3


def test_start_lost_with_the_connection_is_repeated() -> None:
    driven = ready()
    driven.feed(run(1))
    assert len(driven.only(StartGroup)) == 1
    assert driven.only(StartGroup, driven.feed(hello()))[0].roster.number == 1


def test_stop_lost_with_the_connection_is_repeated() -> None:
    driven = running()
    driven.feed(stop(1, CauseKind.JOIN))
    assert driven.only(StopGroup, driven.feed(hello(running=1))) == [
        StopGroup(1, 10.0, ends_step=True)
    ]


def test_killed_workers_of_a_leaving_node_copy_no_state() -> None:
    driven = running()
    driven.feed(LeaveRequested("SIGTERM"))
    commands = driven.feed(stop(1, CauseKind.LOSS))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0, copies=False)]


def test_job_that_ends_with_a_failure_waits_for_no_copies() -> None:
    driven = running()
    commands = driven.feed(ended(0, code=1))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0)], "a round may follow"
    commands = driven.feed(finish(OutcomeKind.FAILED, grace=0.0))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 0.0, copies=False)]
    assert not driven.only(StopGroup, driven.feed(finish(OutcomeKind.FAILED, grace=0.0)))


def test_node_that_leaves_during_a_planned_stop_ends_its_copies() -> None:
    driven = running()
    driven.feed(stop(1, CauseKind.JOIN))
    commands = driven.feed(LeaveRequested("SIGTERM"))
    without = StopGroup(1, 7.0, copies=False, ends_step=True)
    assert driven.only(StopGroup, commands) == [without]
    again = driven.feed(hello(running=1))
    assert driven.only(StopGroup, again) == [without]


def test_job_that_ends_while_this_node_leaves_ends_no_step() -> None:
    driven = running()
    driven.feed(LeaveRequested("SIGTERM"))
    commands = driven.feed(finish(OutcomeKind.STOPPED))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 7.0, copies=False)]


@pytest.mark.parametrize("directive", [None, Idle("registering")], ids=["none", "idle"])
def test_leaving_node_of_an_unknown_round_ends_no_step(directive: Directive | None) -> None:
    driven = Driven(hello(running=1))
    if directive is not None:
        driven.feed(directed(directive))
    commands = driven.feed(LeaveRequested("SIGTERM"))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 7.0, copies=False)]


def test_only_node_of_a_job_ends_no_step_before_it_leaves() -> None:
    driven = ready()
    both = roster(1)
    alone = replace(both, seats=both.seats[1:])
    driven.feed(directed(Run(alone, ME)))
    driven.feed(started(1))
    commands = driven.feed(LeaveRequested("SIGTERM"))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 7.0, copies=False)]


def test_workers_of_restarted_launcher_are_gone() -> None:
    driven = running()
    driven.feed(hello())
    assert told(driven).workers is Workers.NONE
    assert told(driven).failure is not None


# -- the end ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "code", "launcher_code"),
    [
        (OutcomeKind.SUCCEEDED, ExitCode.OK, 0),
        (OutcomeKind.FAILED, ExitCode.FAILED, 1),
        (OutcomeKind.TIMED_OUT, ExitCode.RENDEZVOUS, 3),
        (OutcomeKind.STOPPED, ExitCode.STOPPED, 143),
    ],
)
def test_each_outcome_has_its_exit_codes(
    kind: OutcomeKind, code: ExitCode, launcher_code: int
) -> None:
    driven = ready()
    assert driven.only(Release, driven.feed(finish(kind)))[0].exit_code == launcher_code
    assert not driven.only(Exit), "the launcher is given time to go"
    ending = driven.only(Exit, driven.feed(RuntimeEvent(WorkerRuntimeLost("exit code 0"))))[
        0
    ].ending
    assert ending.code is code
    assert "job digits" in ending.message
    assert "why" in ending.message


def test_wait_for_launcher_exit_is_bounded() -> None:
    driven = ready()
    driven.feed(finish())
    due = wake_at(driven.state)
    assert due is not None
    assert driven.only(Exit, driven.feed(Timer(), after=due - driven.now + 0.01))
    assert driven.feed(run(9)) == [], "nothing follows"


def test_running_workers_end_before_launcher_is_released() -> None:
    driven = running()
    commands = driven.feed(finish(OutcomeKind.STOPPED, grace=4.0))
    assert driven.only(StopGroup, commands) == [StopGroup(1, 4.0, copies=False)]
    assert not driven.only(Release)
    assert driven.only(Release, driven.feed(stopped()))


def test_failed_job_names_first_failure() -> None:
    culprit = Failure(
        2, "uid-0", "node-0", 1, 1, FailureClass.USER_ERROR, 5, exit_code=1,
        message="ValueError: boom", traceback="Traceback …\nValueError: boom",
    )  # fmt: skip
    driven = ready()
    message = driven.only(Release, driven.feed(finish(OutcomeKind.FAILED, culprit)))[0].message
    assert "rank 1 (local rank 1 on node-0) in round 2: exit code 1, UserError" in message
    assert message.endswith("Traceback …\nValueError: boom")


def test_node_whose_workers_succeeded_does_not_leave_because_of_stuck_leftovers() -> None:
    driven = running()
    for rank in (0, 1):
        driven.feed(ended(rank))
    driven.feed(Timer(), after=LEFTOVER_SECONDS)
    driven.feed(STUCK)
    local = told(driven)
    assert (local.done, local.leaving) == (True, "")
    assert driven.only(Release, driven.feed(finish()))[0].exit_code == 0


def test_node_with_stuck_leftovers_leaves_when_another_round_begins() -> None:
    driven = running()
    for rank in (0, 1):
        driven.feed(ended(rank))
    driven.feed(Timer(), after=LEFTOVER_SECONDS)
    driven.feed(STUCK)
    assert not driven.only(StartGroup, driven.feed(run(2)))
    assert told(driven).leaving == "process 7 waits"


def test_returned_connection_with_stuck_workers_charges_no_failure() -> None:
    driven = running()
    event = hello().event
    assert isinstance(event, Hello)
    driven.feed(RuntimeEvent(replace(event, stuck="process 7 waits")))
    local = told(driven)
    assert (local.failure, local.workers, local.leaving) == (None, Workers.NONE, "process 7 waits")


def test_agent_does_not_end_before_the_first_failure_is_read() -> None:
    driven = running()
    outcome = Outcome(OutcomeKind.FAILED, "why")
    reading = directed(Finish(outcome, None, 0.0, reads_failure=True))
    assert driven.only(StopGroup, driven.feed(reading)) == [StopGroup(1, 0.0, copies=False)]
    assert not driven.only(Release, driven.feed(stopped()))
    [release] = driven.only(Release, driven.feed(finish(OutcomeKind.FAILED)))
    assert release.exit_code == 1


def test_refusal_is_user_error() -> None:
    driven = ready()
    driven.feed(directed(Refused("max_nodes differs")))
    driven.feed(RuntimeEvent(WorkerRuntimeLost("released")))
    ending = driven.only(Exit)[0].ending
    assert ending.code is ExitCode.RENDEZVOUS
    assert "max_nodes differs" in ending.message


def test_unchanged_state_is_not_reported_again() -> None:
    driven = running()
    assert not driven.only(ReportLocal, driven.feed(Timer()))
    assert not driven.only(ReportLocal, driven.feed(replace(run(1))))
