"""Transition from a final round to the next: charges, excuses, and the end of the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.coordinator import decide
from elasticjob_rendezvous.protocol.events import PeerUp, Verdict
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    OutcomeKind,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.rendezvous.builders import KEYS, UTC_MS, Job, identity

ABORT, PORT = FailureClass.PEER_ABORT, FailureClass.MASTER_PORT
USER = FailureClass.USER_ERROR
WINDOW = 6.0  # keep-alive and a second


def gang(**bounds: Any) -> Job:
    """Return a job in which three members run round 1; a fourth without workers coordinates."""
    job = Job("z", "a", "b", "c", **{"max_nodes": 3, "max_restarts": 3, **bounds})
    return job.sealed("a", "b", "c").idle().later(60)


def stopped(job: Job, *names: str, round: int = 1) -> Job:
    """Let these members wait with ended workers."""
    for name in names:
        job.change(name, state=MemberState.WAITING, round=round)
    return job


def test_consequence_is_charged_after_a_new_read() -> None:
    """A watch that delivers nothing hides that c is gone."""
    job = gang().failure("a", kind=ABORT)
    assert job.act().pending == (1,)
    job.idle().later(2 * WINDOW)
    memory, view, own = job.coordinator, job.view(), job.stored("z")
    assert decide(memory, view, own, job.clock) is None
    assert memory.must_read, "no charge yet"
    job.delete(KEYS.session(identity("c"), "s1"))
    assert decide(memory, view, own, job.clock) is None, "not read yet"
    memory.checked = memory.doubted
    current = job.act()
    assert (current.pending, current.charged, current.counts.losses) == ((), (), 1)


def test_charge_that_is_postponed_after_the_read_needs_another_one() -> None:
    """A member that falls silent postpones it: its lease may end meanwhile."""
    job = aborted().later(WINDOW)
    memory, own = job.coordinator, job.stored("z")
    assert decide(memory, job.view(), own, job.clock) is None
    assert memory.must_read
    memory.checked = memory.doubted
    job.answers("c", Verdict.UNKNOWN)
    assert decide(memory, job.view(), own, job.clock) is None
    job.later(WINDOW)
    assert decide(memory, job.view(), own, job.clock) is None
    assert memory.must_read


def test_new_coordinator_has_nothing_to_read_again() -> None:
    job = gang().failure("a", kind=ABORT)
    job.act()
    job.idle().later(2 * WINDOW)
    decide(job.coordinator, job.view(), job.stored("z"), job.clock)
    assert job.coordinator.must_read
    job.coordinator.take_over(job.now, ())
    assert not job.coordinator.must_read


def test_failure_with_a_clear_cause_needs_no_new_read() -> None:
    job = gang().failure("b")
    act = decide(job.coordinator, job.view(), job.stored("z"), job.clock)
    assert act is not None
    assert not job.coordinator.must_read


# -- immediate charges ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [USER, FailureClass.OUT_OF_MEMORY, FailureClass.SIGNAL, FailureClass.LAUNCH_ERROR]
)
def test_failure_with_a_clear_cause_is_charged_at_once(kind: FailureClass) -> None:
    current = gang().failure("b", kind=kind).act()
    assert (current.number, current.state) == (2, RoundState.JOINABLE)
    assert current.cause.kind is CauseKind.FAILURE
    assert (current.charged, current.pending) == ((1,), ())


def test_failure_of_an_older_round_of_that_number_is_never_charged() -> None:
    """etcd lost its data, others sealed round 1 anew, and y reports the end of its own round 1."""
    job = gang().member("y", round=1, known=1).failure("y").idle()
    current = job.failure("b", kind=ABORT).act()
    assert (current.cause.members, current.charged, current.pending) == (("b",), (), (1,))
    current = stopped(job.idle(), "a", "b", "c").gone("c", proven=True).act()
    assert (current.charged, current.pending, current.counts.losses) == ((), (), 1)


def test_round_is_charged_once_for_several_failures() -> None:
    current = gang().failure("a").failure("b").failure("c", kind=ABORT).act()
    assert (current.charged, current.pending) == ((1,), ())


@pytest.mark.parametrize("trouble", ["loss", "leave", "join", "scale down"])
def test_interruptions_are_not_charged(trouble: str) -> None:
    job = gang()
    match trouble:
        case "loss":
            job.gone("b")
        case "leave":
            job.change("b", state=MemberState.LEAVING).idle().later(1)
        case "join":
            job.bounds(max_nodes=8)
            job.idle().later(3)
        case "scale down":
            job.bounds(max_nodes=2).idle().later(10)
    current = job.act()
    assert (current.number, current.state) == (2, RoundState.JOINABLE)
    assert (current.charged, current.pending) == ((), ())


def test_restart_count_is_the_number_of_charges() -> None:
    job = gang().round(5, charged=(1, 3), previous=4)
    stopped(job, "a", "b", "c", round=4).act()
    stored = job.view().round
    assert stored is not None
    for name in "abc":
        job.change(name, confirmed=stored.modified)
    job.act()
    assert job.roster(5).restarts == 2


# -- the budget -----------------------------------------------------------------------


def test_failure_after_the_last_restart_ends_the_job() -> None:
    job = gang(max_restarts=2)
    job.round(1, RoundState.FINAL, charged=(7, 8)).failure("b", exit_code=3, message="boom")
    current = job.act()
    assert current.state is RoundState.CLOSED
    assert current.charged == (7, 8, 1)
    assert current.outcome is not None
    assert current.outcome.kind is OutcomeKind.FAILED
    assert "exit code 3: boom" in current.outcome.detail
    assert "(3 failures charged, maxRestarts is 2)" in current.outcome.detail


def test_without_restarts_the_first_failure_ends_the_job() -> None:
    closed = gang(max_restarts=0).failure("b").act()
    assert closed.state is RoundState.CLOSED
    assert closed.outcome is not None
    assert "no restarts allowed" in closed.outcome.detail


# -- waiting for the verdict ----------------------------------------------------------


def aborted(**bounds: Any) -> Job:
    """Return a job with unexplained aborts at a and b; round 2 waits for more nodes."""
    job = (
        gang(**{"min_nodes": 5, "max_nodes": 5, **bounds})
        .failure("a", kind=ABORT)
        .failure("b", kind=ABORT)
    )
    current = job.act()
    assert (current.number, current.state) == (2, RoundState.JOINABLE)
    assert (current.charged, current.pending) == ((), (1,))
    return stopped(job, "a", "b", "c").idle()


def test_aborted_collective_is_charged_without_a_loss() -> None:
    job = aborted().later(WINDOW - 0.1).idle()
    current = job.later(0.1).act()
    assert (current.charged, current.pending) == ((1,), ())
    assert (current.number, current.state) == (2, RoundState.JOINABLE)


@pytest.mark.parametrize(
    ("state", "round"),
    [(MemberState.RUNNING, 1), (MemberState.STOPPING, 1), (MemberState.WAITING, 0)],
    ids=["it runs", "it stops its workers", "it has not started yet"],
)
def test_charging_waits_for_a_member_that_has_not_reported(state: MemberState, round: int) -> None:
    """The member may be about to report its leave, which takes a while to arrive."""
    job = aborted(stop_grace_seconds=60).change("c", state=state, round=round)
    job.later(2 * WINDOW - 0.1).idle()
    current = job.change("c", state=MemberState.LEAVING, reason="evicted").act()
    assert (current.charged, current.cause.members, current.counts.leaves) == ((), ("c",), 1)


def test_charging_does_not_wait_for_running_members_forever() -> None:
    job = aborted(stop_grace_seconds=60).change("c", state=MemberState.RUNNING, round=1)
    assert job.later(WINDOW).idle().later(WINDOW).act().charged == (1,)


def test_charging_waits_for_the_lease_of_a_silent_member() -> None:
    """The lease may last a little longer than the window; its expiry is then the reason."""
    job = aborted().answers("c", Verdict.UNKNOWN).later(WINDOW).idle()
    current = job.later(1).gone("c").act()
    assert (current.charged, current.pending, current.counts.losses) == ((), (), 1)


def test_silent_member_that_keeps_its_lease_does_not_prevent_the_charge() -> None:
    job = aborted().answers("c", Verdict.UNKNOWN).later(WINDOW).idle().later(WINDOW - 0.1).idle()
    assert job.later(0.1).act().charged == (1,)


def test_silent_member_heard_again_does_not_prevent_the_charge() -> None:
    job = aborted().answers("c", Verdict.UNKNOWN).later(WINDOW - 1)
    job.coordinator.peers.up(PeerUp(identity("c"), "s1"), job.now)
    assert job.idle().later(1).act().charged == (1,)


def test_loss_prevents_charge_of_aborted_collective() -> None:
    """A silent node first shows as its peers' aborted collectives."""
    current = aborted().later(4).gone("c").act()
    assert (current.charged, current.pending) == ((), ())
    assert (current.number, current.cause.kind) == (2, CauseKind.LOSS)
    assert current.cause.members == ("c",)


def test_cut_off_member_reported_after_the_aborts_prevents_the_charge() -> None:
    """Its launcher ended its workers; its record came after those of its peers' failures."""
    current = aborted().later(2).change("c", cut_off_round=1).act()
    assert (current.charged, current.pending, current.counts.losses) == ((), (), 1)
    assert (current.cause.kind, current.cause.members) == (CauseKind.LOSS, ("c",))


def test_corrected_cause_is_corrected_in_the_history() -> None:
    job = aborted()
    job.put(KEYS.history(2), History(2, job.current().cause, 2, stop_ms=7))
    job.later(4).gone("c").act()
    history = job.read(History, KEYS.history(2))
    assert (history.cause.kind, history.cause.members) == (CauseKind.LOSS, ("c",))
    assert history.stop_ms == 7


def two_failures_on() -> Job:
    """Round 1 broke at a and awaits its verdict; round 2 ended by b's own failure."""
    job = gang(min_nodes=5, max_nodes=5).failure("a", kind=ABORT)
    job.sealed("a", "b", number=2, pending=(1,)).failure("b", round=2, message="own error").act()
    assert (job.current().number, job.current().charged, job.current().pending) == (3, (2,), (1,))
    return stopped(job, "a", "b", "c", round=2).idle()


def test_pending_charge_does_not_delay_another() -> None:
    job = aborted()
    job.put(KEYS.roster(2), replace(job.roster(1), number=2)).failure("a", round=2, kind=ABORT)
    job.round(3, previous=2, pending=(1, 2), cause=Cause(CauseKind.FAILURE, ("a",)))
    stopped(job, "a", "b", "c", round=2).idle()
    current = job.failure("c", round=2, message="the true cause").act()
    assert (current.charged, current.pending) == ((2,), (1,))


@pytest.mark.parametrize("excused", [True, False])
def test_charging_keeps_the_cause_of_a_later_round(excused: bool) -> None:
    job = two_failures_on()
    cause = job.current().cause
    current = (job.gone("c") if excused else job.later(WINDOW)).act()
    assert current.pending == ()
    assert current.charged == ((2,) if excused else (2, 1))
    assert current.cause == cause
    assert cause.members == ("b",)


@pytest.mark.parametrize("excused", [True, False])
def test_charging_keeps_a_cause_that_is_no_failure(excused: bool) -> None:
    job = aborted()
    number = 2 if excused else 3
    cause = Cause(CauseKind.DATA_LOST, (), "members know round 1")
    job.round(number, previous=1, pending=(1,), cause=cause).idle()
    current = (job.gone("c") if excused else job.later(WINDOW)).act()
    assert (current.pending, current.charged) == ((), () if excused else (1,))
    assert current.cause == cause


@pytest.mark.parametrize("excused", [True, False])
def test_charging_is_logged(excused: bool) -> None:
    names = ["pod-1", "pod-2", "pod-3", "pod-4", "pod-5"]
    job = Job("z", *names, min_nodes=9, max_nodes=9, max_restarts=3).sealed(*names)
    job.idle().later(60).failure("pod-1", kind=ABORT).act()
    stopped(job, *names).idle()
    act = (job.gone(*names[1:]) if excused else job.later(WINDOW)).decide()
    assert act is not None
    assert act.note.startswith("round 1: ")
    assert ("not charged: pod-2, pod-3, pod-4 was" in act.note) is excused
    assert ("not" not in act.note) is not excused


def test_log_names_first_preempted_members() -> None:
    names = ["pod-1", "pod-2", "pod-3", "pod-4", "pod-5"]
    job = Job("z", *names, min_nodes=9, max_nodes=9).sealed(*names).idle().later(60)
    for name in names[1:]:
        job.change(name, state=MemberState.LEAVING)
    job.idle().later(1).act()
    marks = tuple(DrainRequest(identity(name), "Preempted", preempted=True) for name in names[1:])
    act = job.bounds(min_nodes=9, max_nodes=9, marks=marks).decide()
    assert act is not None
    assert act.note.startswith("round 2: ")
    assert " pod-2, pod-3, pod-4 " in act.note


def test_aborted_collective_of_unknown_roster_is_charged() -> None:
    """The roster is gone: nobody of it can be missed."""
    job = aborted().delete(KEYS.roster(1)).idle().later(WINDOW - 0.1).idle()
    current = job.later(0.1).act()
    assert (current.charged, current.pending) == ((1,), ())


def test_linked_member_is_not_waited_for_as_silent() -> None:
    """Of its present session nothing was heard, but its agent still speaks on an earlier link."""
    job = aborted().later(WINDOW - 2)
    job.coordinator.peers.up(PeerUp(identity("c"), "s0"), job.now)
    job.answers("c", Verdict.UNKNOWN).idle().later(2)
    assert job.act().charged == (1,)


def test_leave_prevents_charge_of_aborted_collective() -> None:
    current = aborted().change("c", state=MemberState.LEAVING).act()
    assert (current.charged, current.pending) == ((), ())


def test_drain_request_prevents_charge_of_aborted_collective() -> None:
    """A leaver's own report may be lost when its machine is being taken away."""
    evicted = DrainRequest(identity("c"), "EvictionByEvictionAPI", preempted=True)
    current = aborted().bounds(marks=(evicted,)).act()
    assert (current.charged, current.pending) == ((), ())
    assert (current.cause.kind, current.cause.members) == (CauseKind.PREEMPTION, ("c",))


@pytest.mark.parametrize(
    ("session", "failed", "excused"),
    [("s2", False, True), ("s2", True, True), ("s1", False, False)],
    ids=["came back", "came back and had failed", "never went"],
)
def test_workers_ended_without_agent_prevent_charge_of_aborted_collective(
    session: str, failed: bool, excused: bool
) -> None:
    """The launcher ended the workers, or they were the first to abort: their agent was away."""
    job = aborted()
    if failed:
        job.failure("c", kind=ABORT)
    job.gone("c").member("c", session=session, round=1)
    current = job.later(WINDOW).act()
    assert current.charged == (() if excused else (1,))
    assert current.pending == ()


def test_new_session_does_not_prevent_charge_of_a_clear_failure() -> None:
    job = aborted().failure("c", message="the true cause")
    assert job.gone("c").member("c", session="s2", round=1).act().charged == (1,)


def test_new_session_of_done_member_does_not_prevent_the_charge() -> None:
    job = aborted().done("c").gone("c").member("c", session="s2", round=1).idle().later(WINDOW)
    assert job.act().charged == (1,)


def test_peer_that_ended_with_success_is_named() -> None:
    """The others waited for a member that ended too early: their messages do not name it."""
    job = gang(max_restarts=0).done("c").failure("a", kind=ABORT, message="peer gone")
    said = "rank 0 on a ended with exit code 1: peer gone; by then c had ended with success"
    assert job.act().cause.detail == said
    stopped(job, "a", "b").decide()
    for _ in range(20):
        if (act := job.later(WINDOW / 4).decide()) is not None:
            job.commit(act.txn)
    closed = job.current()
    assert closed.outcome is not None
    assert closed.outcome.detail == f"{said} (no restarts allowed)"
    own = gang().done("c").failure("a", message="own error").act()
    assert own.cause.detail == "rank 0 on a ended with exit code 1: own error"


def test_removed_done_member_does_not_prevent_the_charge() -> None:
    job = aborted().done("c").gone("c").idle().later(WINDOW)
    assert job.act().charged == (1,)


def test_cause_reported_later_is_charged_at_once() -> None:
    current = aborted().failure("c", message="the true cause").act()
    assert (current.charged, current.pending) == ((1,), ())


HANG = FailureClass.HANG


def test_late_first_failure_becomes_the_cause_of_the_round() -> None:
    """A hung worker's failure is reported seconds after those of its waiting peers."""
    job = aborted(stop_grace_seconds=60).change("c", state=MemberState.STOPPING, round=1)
    current = job.failure("c", kind=HANG, message="no progress").act()
    assert current.cause.members == ("c",)
    assert current.cause.detail == "rank 0 on c hung: no progress"
    assert current.cause.kind is CauseKind.FAILURE


@pytest.mark.parametrize("row", [0, 3])
def test_cause_of_the_round_is_the_first_failure_in_the_status(row: int) -> None:
    """The failures have the same reason: the first report need not be the first failure."""
    job = Job("z", "a", "b", "c", max_nodes=3, max_restarts=9)
    job.sealed("a", "b", "c", streak=Streak(row)).idle().later(1)
    opened = job.failure("b").act()
    assert (opened.cause.members, opened.charged) == (("b",), (1,))
    job.failure("a", at_ms=UTC_MS - 5, message="first")
    stopped(job, "a", "b", "c").decide()  # backs off from now on
    frozen = job.later(4).act()
    assert frozen.state is RoundState.FROZEN
    assert frozen.cause.members == ("a",)
    said = "rank 0 on a ended with exit code 1: first"
    backing = "; backing off 4 s after the fourth failure in a row" * bool(row)
    assert frozen.cause.detail == said + backing


def test_outcome_names_the_member_of_the_first_failure() -> None:
    closed = gang(max_restarts=0).failure("b").act()
    assert closed.outcome is not None
    assert closed.outcome.culprit == identity("b")


def test_charging_does_not_delay_the_next_round() -> None:
    job = aborted().bounds(max_nodes=3, max_restarts=3)
    assert job.act().state is RoundState.FROZEN
    stored = job.view().round
    assert stored is not None
    job.decide()
    for name in "abc":
        job.change(name, confirmed=stored.modified)
    assert job.act().state is RoundState.FINAL
    job.idle().later(WINDOW)
    current = job.act()
    assert (current.state, current.charged) == (RoundState.FINAL, (1,))


def test_charging_does_not_change_a_frozen_round() -> None:
    """A verdict would change the revision that members confirm."""
    job = aborted().bounds(max_nodes=3, max_restarts=3, confirm_seconds=60)
    assert job.act().state is RoundState.FROZEN
    job.idle().later(WINDOW + 1).idle()


def test_job_is_not_closed_before_charging() -> None:
    job = aborted(max_restarts=0).later(WINDOW - 0.1).idle()
    closed = job.later(0.1).act()
    assert closed.state is RoundState.CLOSED
    assert closed.charged == (1,)


def test_uncharged_round_does_not_close_the_job() -> None:
    current = aborted(max_restarts=0).gone("c").act()
    assert (current.state, current.charged) == (RoundState.JOINABLE, ())


def test_new_coordinator_waits_the_full_time_again() -> None:
    job = aborted().later(WINDOW - 1)
    job.coordinator.take_over(job.now, ())
    job.idle().later(WINDOW - 0.1).idle()
    assert job.later(0.1).act().charged == (1,)


# -- the master's port ----------------------------------------------------------------


def port_taken(retries: int, charged: tuple[int, ...] = ()) -> Job:
    """Return a job whose rank 0 could not bind its port, after `retries` such rounds in a row."""
    job = gang().round(1, RoundState.FINAL, port_retries=retries, charged=charged)
    return job.failure("a", kind=PORT).failure("b", kind=ABORT)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_taken_port_is_retried_three_times_without_charge(retries: int) -> None:
    current = port_taken(retries).act()
    assert (current.number, current.cause.kind) == (2, CauseKind.MASTER_PORT)
    assert (current.charged, current.pending) == ((), ())
    assert current.port_retries == retries + 1


def test_fourth_taken_port_is_charged() -> None:
    current = port_taken(3).act()
    assert (current.state, current.charged) == (RoundState.JOINABLE, (1,))
    assert port_taken(3, charged=(7, 8, 9)).act().state is RoundState.CLOSED


@pytest.mark.parametrize("trouble", ["loss", "failure"])
def test_other_cause_resets_the_port_retries(trouble: str) -> None:
    job = gang().round(1, RoundState.FINAL, port_retries=2)
    current = (job.gone("b") if trouble == "loss" else job.failure("b")).act()
    assert current.port_retries == 0


# -- success --------------------------------------------------------------------------


def test_done_roster_closes_the_job_on_its_round() -> None:
    job = gang().done("a", "b", "c").gone("a", "b")
    current = job.act()
    assert (current.number, current.state) == (1, RoundState.CLOSED)
    assert current.outcome is not None
    assert current.outcome.kind is OutcomeKind.SUCCEEDED


def test_failure_before_the_last_done_restarts_done_members() -> None:
    job = gang().done("a").change("a", state=MemberState.DONE).failure("b")
    assert job.act().number == 2
    stopped(job, "a", "b", "c")
    assert set(job.act().ids) >= {identity(name) for name in "abc"}
