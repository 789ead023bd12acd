"""Job record served by an agent that follows a handler."""

from __future__ import annotations

from typing import Any

from elasticjob_agent.core.job_records import ObservedJob, observe_step, records
from elasticjob_agent.core.poll_step import (
    BarrierTimedOut,
    Departed,
    Event,
    Joined,
    LocalChanged,
    Polled,
)
from elasticjob_operator.domain.observed.etcd_records import decode_records as read_records
from elasticjob_operator.domain.observed.etcd_records import rendezvous_view
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.records.agent_reports import agent_report, merged
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    MemberState,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.unit.agent.core.test_polling import READY, Part, failure, roster

PREFIX = "/elasticjob/default/uid/1/"
KEYS = Keys(PREFIX)
ME = Identity("me", "job-0", "10.0.0.7", 0, node="rack-a")


class Teller:
    """Recorder of a part's steps; every event takes 100 ms."""

    def __init__(self) -> None:
        self.part, self.known, self.utc_ms = Part(), ObservedJob(), 0

    def feed(self, event: Event) -> None:
        before = self.part.state
        self.part.feed(event)
        self._note(before)

    def tells(self, **facts: Any) -> None:
        before = self.part.state
        self.part.tells(**facts)
        self._note(before)

    def _note(self, before: Any) -> None:
        self.utc_ms += 100
        self.known = observe_step(self.known, before, self.part.state, ME, self.utc_ms)

    def runs(self, number: int, restarts: int = 0) -> None:
        self.feed(Joined(roster(number, restarts)))
        self.tells(workers=Workers.RUNNING, round=number, start_ms=30, failure=None, done=False)

    def fails(self, kind: FailureClass = FailureClass.USER_ERROR) -> None:
        number = self.part.state.number
        self.tells(workers=Workers.NONE, failure=failure(number, kind))

    def view(self) -> Any:
        found = records(self.known, self.part.state, ME, "s", PREFIX, RendezvousParams(1, 4))
        answers = [agent_report(PREFIX, "c10d", "me", found)]
        return rendezvous_view(read_records(PREFIX, merged(PREFIX, answers)))


def seeking() -> Teller:
    told = Teller()
    told.feed(LocalChanged(READY))
    return told


def test_no_members_before_launcher_is_connected():
    told = Teller()
    view = told.view()
    assert view.round == 0
    assert view.members == ()


def test_first_round_is_joinable_then_final():
    told = seeking()
    assert (told.view().state, told.view().round) == ("joinable", 1)
    assert [m.state for m in told.view().members] == ["waiting"]
    told.runs(1)
    view = told.view()
    assert (view.state, view.round, view.nodes, view.world_size) == ("final", 1, 1, 1)
    assert view.master == "job-0"
    assert [(m.name, m.state, view.ranks[m.id], m.node) for m in view.members] == [
        ("job-0", "running", 0, "rack-a")
    ]
    assert [(r.number, r.cause.kind, r.start_ms) for r in view.rounds] == [(1, "start", 30)]
    told.tells(first_step_ms=80, lost_steps=2, lost_ms=500, lost_reason="Cost")
    [found] = told.view().rounds
    assert (found.start_ms, found.first_step_ms) == (30, 80)
    assert (found.lost_steps, found.lost_ms, found.lost_reason) == (2, 500, "Cost")


def test_failure_is_reported_with_traceback_and_opens_next_round():
    told = seeking()
    told.runs(1)
    told.fails()
    view = told.view()
    assert (view.state, view.round, view.cause.kind) == ("joinable", 2, "failure")
    assert view.cause.members == ("node-1",)
    told.runs(2, restarts=1)
    view = told.view()
    assert view.failures_charged == 1
    assert view.first_failure.round == 1
    assert view.first_failure.message == "it broke"
    assert view.rounds[-1].cause.kind == CauseKind.FAILURE
    assert view.rounds[-1].join_ms == 100


def test_round_that_ends_without_failure_reports_durations():
    told = seeking()
    told.runs(1)
    told.feed(Polled(waiting=1))
    assert told.view().state == RoundState.JOINABLE
    told.tells(workers=Workers.STOPPING)
    assert told.view().members[0].state == MemberState.STOPPING
    told.tells(workers=Workers.NONE)
    told.runs(2)
    last = told.view().rounds[-1]
    assert (last.cause.kind, last.stop_ms, last.join_ms) == ("join", 200, 100)


def test_newcomer_counts_earlier_charges():
    told = seeking()
    told.runs(7, restarts=2)
    assert told.view().failures_charged == 2
    assert told.view().first_failure is None


def test_spent_budget_closes_with_the_failure():
    told = seeking()
    told.runs(1)
    told.fails()
    told.runs(2, restarts=1)
    told.fails()
    told.runs(3, restarts=2)
    told.fails(FailureClass.SIGNAL)
    view = told.view()
    assert view.state == RoundState.CLOSED
    assert view.outcome.kind == OutcomeKind.FAILED
    assert view.first_failure.round == 3
    assert view.failures_charged == 3


def test_success():
    told = seeking()
    told.runs(1)
    told.tells(workers=Workers.NONE, done=True)
    assert told.view().members[0].state == MemberState.DONE
    assert told.view().state == RoundState.FINAL
    told.feed(Polled(met=True))
    assert told.view().outcome.kind == OutcomeKind.SUCCEEDED


def test_agent_done_without_exit_barrier_does_not_end_the_job():
    told = seeking()
    told.runs(1)
    told.tells(workers=Workers.NONE, done=True)
    told.feed(BarrierTimedOut("etcd did not answer"))
    view = told.view()
    assert (view.state, view.outcome) == (RoundState.FINAL, None)
    assert view.members[0].state == MemberState.DONE


def test_left_agent_is_no_member_and_closes_nothing():
    told = seeking()
    told.runs(1)
    told.tells(leaving="drained")
    assert told.view().members[0].state == MemberState.LEAVING
    told.tells(workers=Workers.NONE)
    told.feed(Departed())
    view = told.view()
    assert view.members == ()
    assert view.outcome is None
