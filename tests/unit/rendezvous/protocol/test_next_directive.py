"""Directives to the agent about its workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.scale_up import waiting_reason
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Idle, Run, Stop
from elasticjob_rendezvous.protocol.next_directive import Facts, direct
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    LossRow,
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
    Save,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.rendezvous.builders import Job, a_failure, a_round, identity

IDLE = Local(ready=True, master_port=1)
BOUNDS = RendezvousParams(1, 4, stop_grace_seconds=10, max_restarts=5)


def directed(
    job: Job,
    local: Local = IDLE,
    *,
    safe: bool = True,
    late: bool = False,
    last_roster: Roster | None = None,
    **own: Any,
) -> Directive:
    return direct(Facts(job.own("a", local=local, **own), BOUNDS, safe, last_roster, late))


def final(*names: str, number: int = 2) -> Job:
    """Return a job whose round has just become final; a has not started."""
    job = Job(*names).sealed(*names, number=number)
    return job.change("a", state=MemberState.WAITING, round=0)


def running(number: int = 2, **local: Any) -> Local:
    return Local(**{"ready": True, "workers": Workers.RUNNING, "round": number, **local})


# -- starting -------------------------------------------------------------------------


def test_workers_start_on_a_final_round_with_own_rank_assignment() -> None:
    job = final("a", "b")
    assert directed(job) == Run(job.roster(2), identity("a"), max_restarts=5, precedes_stop=True)


@pytest.mark.parametrize("state", [RoundState.JOINABLE, RoundState.FROZEN])
def test_no_start_on_a_round_that_is_not_final(state: RoundState) -> None:
    job = final("a", "b").round(2, state)
    assert directed(job) == Idle(f"round 2 is {state}")


@pytest.mark.parametrize(
    "own",
    [{"lease_holds": False}, {"local": Local(ready=False)}, {"local": Local(ready=True, round=2)},
     {"session": "s9"}],
    ids=["lease over", "not ready", "ran before", "not registered"],
)  # fmt: skip
def test_conditions_that_prevent_a_start(own: dict[str, Any]) -> None:
    assert isinstance(directed(final("a", "b"), **own), Idle)


@pytest.mark.parametrize("state", [s for s in MemberState if s is not MemberState.WAITING])
def test_member_not_recorded_as_waiting_starts_nothing(state: MemberState) -> None:
    """The coordinator may still wait for its older workers."""
    assert directed(final("a", "b").change("a", state=state)) == Idle("round 2 is final")


def test_first_round_reports_its_wait_reason() -> None:
    job = final("a", "b", number=1).round(1, RoundState.JOINABLE)
    said = "round 1 is joinable: it starts with 4 nodes, or with at least 1 after 30 s"
    assert directed(job) == Idle(said)


def test_done_member_is_no_newcomer() -> None:
    done = Local(ready=True, round=2, done=True)
    said = "round 2 is final: this node is done, and ends when the others do"
    assert directed(final("a", "b"), done) == Idle(said)


def test_member_without_rank_assignment_waits() -> None:
    job = Job("a", "b").sealed("b", number=2)
    assert isinstance(directed(job), Idle)


def test_leaving_member_starts_nothing() -> None:
    assert directed(final("a", "b"), leaving="drained") == Idle("leaving")


def test_before_registration_the_directive_is_idle() -> None:
    assert directed(Job("a")) == Idle("registering")


PATIENT = replace(BOUNDS, scale_up_wait_seconds=600.0)


@pytest.mark.parametrize(
    ("number", "state", "local", "bounds", "said"),
    [
        (2, RoundState.FINAL, IDLE, BOUNDS, "round 2 is final"),
        (2, RoundState.FINAL, replace(IDLE, round=2), BOUNDS, "round 2 is final"),
        (2, RoundState.FINAL, replace(IDLE, round=1, done=True), BOUNDS, "round 2 is final"),
        (2, RoundState.FINAL, IDLE, None, "round 2 is final"),
        (2, RoundState.JOINABLE, IDLE, BOUNDS, "round 2 is joinable"),
        (2, RoundState.JOINABLE, IDLE, PATIENT, "round 2 is joinable"),
        (2, RoundState.FROZEN, replace(IDLE, round=2, done=True), BOUNDS, "round 2 is frozen"),
        (1, RoundState.JOINABLE, IDLE, None, "round 1 is joinable"),
        (1, RoundState.FROZEN, IDLE, BOUNDS, "round 1 is frozen"),
    ],
)
def test_member_without_rank_assignment_reports_the_round_state(
    number: int, state: RoundState, local: Local, bounds: RendezvousParams | None, said: str
) -> None:
    job = Job("a", "b").sealed("b", number=number).round(number, state, nodes=1)
    assert direct(Facts(job.own("a", local=local), bounds, True, None)) == Idle(said)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (PATIENT, "for 600 s"),
        (replace(PATIENT, scale_up_wait_seconds=0.5), "for 0.5 s"),
        (replace(PATIENT, min_nodes=1, increment=2), "by 1"),
    ],
    ids=["long", "not long", "of no use"],
)
def test_member_waiting_for_a_checkpoint_reports_it(bounds: RendezvousParams, said: str) -> None:
    own = Job("a", "b").sealed("b", number=2).own("a", local=IDLE)
    waits = direct(Facts(own, bounds, True, None))
    assert waits == Idle(f"round 2 is final: {waiting_reason(bounds, 1, 1)}")
    assert isinstance(waits, Idle)
    assert said in waits.reason


def test_member_waiting_for_the_save_of_the_running_workers_reports_it() -> None:
    save = Save(Cause(CauseKind.JOIN, ("a",)), 60.0)
    job = Job("a", "b").sealed("b", number=2).round(2, RoundState.FINAL, nodes=1, save=save)
    assert directed(job) == Idle(f"round 2 is final: {waiting_reason(BOUNDS, 1, 1, save)}")


def test_member_that_was_lost_again_reports_its_losses_and_the_delay() -> None:
    losses = (LossRow(identity("a"), "a", 3, 1, 0, 40_000),)
    job = Job("a", "b").sealed("b", number=2, losses=losses)
    waits = direct(Facts(job.own("a", local=IDLE), RendezvousParams(1, 2), True, None))
    assert waits == Idle(
        "round 2 is final: a was lost 3 times in 40 s without progress, so it waits for 10 s "
        "after it registers, unless other nodes need it"
    )
    full = direct(Facts(job.own("a", local=IDLE), RendezvousParams(1, 1), True, None))
    assert full == Idle("round 2 is final")


def test_member_that_was_lost_again_reports_the_wait_for_a_checkpoint_as_well() -> None:
    losses = (LossRow(identity("a"), "a", 3, 1, 0, 40_000),)
    job = Job("a", "b").sealed("b", number=2, losses=losses)
    waits = direct(Facts(job.own("a", local=IDLE), PATIENT, True, None))
    assert isinstance(waits, Idle)
    assert waits.reason.endswith(
        "unless other nodes need it; newcomers wait for the next checkpoint, for 600 s at most"
    )


def test_surplus_member_reports_no_wait_reason_if_newcomers_do_not_wait() -> None:
    own = Job("a", "b").sealed("b", number=2).own("a", local=IDLE)
    assert direct(Facts(own, RendezvousParams(1, 1), True, None)) == Idle("round 2 is final")


@pytest.mark.parametrize("registered", [False, True])
def test_member_waiting_for_etcd_reports_the_cause(registered: bool) -> None:
    trouble = StoreTrouble("etcd", StoreState.REFUSING, "etcd:2379", "etcdserver: no", 1)
    job = Job("a").round(2) if registered else Job("a")
    facts = Facts(job.own("a", local=IDLE), BOUNDS, True, None, store=trouble)
    assert direct(facts) == Idle(trouble.waiting)


# -- continuing and stopping ----------------------------------------------------------


def test_running_workers_continue() -> None:
    job = final("a", "b")
    assert isinstance(directed(job, running()), Run)
    assert isinstance(directed(job, running(), lease_holds=False), Run)


def test_unsafe_workers_are_killed() -> None:
    order = directed(final("a", "b"), running(), safe=False)
    assert isinstance(order, Stop)
    assert (order.round, order.kill, order.grace_seconds) == (2, True, 0.0)
    assert (order.cause.kind, order.cause.members) == (CauseKind.LOSS, ())
    assert order.cause.detail.startswith("cut off")


@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        (CauseKind.LOSS, True),
        (CauseKind.FAILURE, True),
        (CauseKind.MASTER_PORT, True),
        (CauseKind.DATA_LOST, True),
        (CauseKind.LEAVE, False),
        (CauseKind.JOIN, False),
        (CauseKind.SCALE_DOWN, False),
    ],
)
def test_newer_round_stops_workers_of_the_older_one(kind: CauseKind, kill: bool) -> None:
    cause = Cause(kind, ("b",))
    job = final("a", "b").round(3, cause=cause)
    assert directed(job, running()) == Stop(2, kill, cause, 0.0 if kill else 10.0)


def test_local_failure_kills_other_workers_at_once() -> None:
    failure = a_failure("a", round=2, message="boom")
    order = directed(final("a", "b"), running(failure=failure))
    assert order == Stop(2, True, Cause(CauseKind.FAILURE, ("a",), "boom"), 0.0)


def test_leaving_member_stops_its_workers_with_grace() -> None:
    order = directed(final("a", "b"), running(), leaving="drained")
    assert order == Stop(2, False, Cause(CauseKind.LEAVE, ("a",), "drained"), 10.0)


def test_workers_of_leaving_member_have_the_grace_of_the_job() -> None:
    own = final("a", "b").own("a", local=running(), leaving="drained")
    order = direct(
        Facts(own, RendezvousParams(1, 4, stop_grace_seconds=7), safe=True, last_roster=None)
    )
    assert isinstance(order, Stop)
    assert (order.kill, order.grace_seconds) == (False, 7.0)


@pytest.mark.parametrize("leaving", ["", "drained"])
def test_workers_overdue_to_stop_get_no_more_grace(leaving: str) -> None:
    job = final("a", "b").round(3, cause=Cause(CauseKind.JOIN, ("b",)))
    order = directed(job, running(), late=True, leaving=leaving)
    assert isinstance(order, Stop)
    assert (order.kill, order.grace_seconds) == (True, 0.0)


def test_leaving_member_without_evidence_kills_its_workers() -> None:
    order = directed(final("a", "b"), running(), safe=False, leaving="drained")
    assert isinstance(order, Stop)
    assert order.kill


def test_last_roster_is_used_without_etcd() -> None:
    roster = final("a", "b").roster(2)
    assert directed(Job(), running(), last_roster=roster) == Run(
        roster, identity("a"), 5, precedes_stop=True
    )
    unknown = directed(Job(), running(3), last_roster=roster)
    assert isinstance(unknown, Idle)
    assert unknown.reason.startswith("workers are running")


# -- saving ---------------------------------------------------------------------------


SAVE = Save(Cause(CauseKind.JOIN, ("c",)), 60.0)


def test_workers_of_the_final_round_get_the_save_request() -> None:
    job = final("a", "b")
    asked = job.round(2, RoundState.FINAL, save=SAVE)
    order = Run(job.roster(2), identity("a"), max_restarts=5, save=SAVE, precedes_stop=True)
    assert directed(asked, running()) == order
    assert directed(asked.round(2, RoundState.FINAL), running()) == replace(order, save=None)


@pytest.mark.parametrize(
    ("number", "state"),
    [(1, RoundState.FINAL), (1, RoundState.FROZEN), (2, RoundState.FROZEN)],
    ids=["older and final", "older and frozen", "frozen"],
)
def test_save_request_counts_only_in_its_final_round(number: int, state: RoundState) -> None:
    """A member that outlived a loss of etcd's data may run a later round than the one it reads."""
    job = final("a", "b")
    roster = job.roster(2)
    order = directed(job.round(number, state, save=SAVE), running(), last_roster=roster)
    assert order == Run(roster, identity("a"), max_restarts=5, save=None, precedes_stop=True)


# -- finishing ------------------------------------------------------------------------


def closed(kind: OutcomeKind, **fields: Any) -> Job:
    job = final("a", "b")
    return job.round(2, RoundState.CLOSED, outcome=Outcome(kind, "why"), **fields)


@pytest.mark.parametrize("kind", list(OutcomeKind))
@pytest.mark.parametrize("local", [IDLE, running()], ids=["idle", "running"])
def test_closed_job_is_finished_whatever_runs(kind: OutcomeKind, local: Local) -> None:
    order = directed(closed(kind), local, leaving="drained", safe=False)
    assert isinstance(order, Finish)
    assert order.outcome == Outcome(kind, "why")
    assert order.grace_seconds == (0.0 if kind is OutcomeKind.FAILED else 10.0)
    assert order.failure is None


def test_failed_job_names_first_failure_of_the_last_charged_round() -> None:
    job = closed(OutcomeKind.FAILED, charged=(1, 2))
    job.failure("b", round=1, message="excused long ago").failure("b", round=2, message="boom")
    order = directed(job)
    assert isinstance(order, Finish)
    assert order.failure is not None
    assert order.failure.message == "boom"


def test_failed_job_names_first_failure_of_its_outcome() -> None:
    job = final("a", "b").failure("b", message="boom").failure("a", at_ms=1, message="told later")
    outcome = Outcome(OutcomeKind.FAILED, "b: boom", "id-b")
    order = directed(job.round(2, RoundState.CLOSED, outcome=outcome, charged=(1,)))
    assert isinstance(order, Finish)
    assert order.failure is not None
    assert order.failure.message == "boom"


def test_manual_close_means_stopped() -> None:
    job = final("a").put("/elasticjob/team/uid/0/state/round", a_round(2, RoundState.CLOSED))
    assert directed(job) == Finish(Outcome(OutcomeKind.STOPPED), None, 10.0)
