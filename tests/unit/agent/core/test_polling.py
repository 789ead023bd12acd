"""Directives derived from a handler's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_agent.core.poll_step import (
    STEADY_SECONDS,
    UNCHARGED_IN_A_ROW,
    BarrierTimedOut,
    CloseAll,
    Depart,
    Departed,
    EnterExitBarrier,
    Event,
    Join,
    Joined,
    JoinTrouble,
    LocalChanged,
    NoteFailure,
    NotJoined,
    Order,
    Phase,
    Polled,
    PollingState,
    PollingTerms,
    poll_step,
)
from elasticjob_agent.polling.poll import done_note, poll_round
from elasticjob_rendezvous.protocol.directives import Finish, Idle, Left, Refused, Run, Stop
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import CauseKind, Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

TERMS = PollingTerms("me", "digits", max_restarts=2, stop_grace_seconds=7.0)
READY = Local(ready=True, master_port=4000)


def roster(number: int, restarts: int = 0) -> Roster:
    assignment = RankAssignment("me", "me", "", 1, "default", 0, 0, 0, 1)
    return Roster(number, 1, "127.0.0.1", 29400, (assignment,), restarts)


def failure(number: int, kind: FailureClass = FailureClass.USER_ERROR) -> Failure:
    return Failure(number, "me", "node-1", 0, 0, kind, 0, 1, None, "it broke")


class Part:
    """State driven by events."""

    def __init__(self, *events: Event) -> None:
        self.state = PollingState(TERMS)
        self.now = 0.0
        for event in events:
            self.feed(event)

    def feed(self, event: Event, after: float = 1.0) -> tuple[Order, ...]:
        self.now += after
        self.state, orders = poll_step(self.state, event, self.now)
        return orders

    def tells(self, after: float = 1.0, **facts: Any) -> tuple[Order, ...]:
        return self.feed(LocalChanged(replace(self.state.local, **facts)), after)

    @property
    def directive(self) -> Any:
        return self.state.directive


def running(number: int = 1, restarts: int = 0) -> Part:
    part = Part(LocalChanged(READY), Joined(roster(number, restarts)))
    part.tells(workers=Workers.RUNNING, round=number)
    return part


def test_rendezvous_is_joined_once_launcher_is_connected() -> None:
    part = Part()
    assert part.feed(LocalChanged(Local())) == ()
    assert part.feed(LocalChanged(READY)) == (Join(charge=False, restarts=0),)
    assert part.feed(LocalChanged(READY)) == ()
    assert isinstance(part.directive, Idle)
    part.feed(Joined(roster(1)))
    assert part.state.directive == Run(roster(1), "me", 2)


def test_waiting_node_stops_round_with_grace() -> None:
    part = running()
    part.feed(Polled())
    assert isinstance(part.directive, Run)
    part.feed(Polled(waiting=2))
    stop = part.directive
    assert isinstance(stop, Stop)
    assert (stop.round, stop.kill, stop.cause.kind, stop.grace_seconds) == (
        (1, False, CauseKind.JOIN, 7.0)
    )
    assert part.tells(workers=Workers.STOPPING) == ()
    assert part.tells(workers=Workers.NONE) == (Join(False, 0),)


def test_waiting_node_after_own_failure_kills_workers() -> None:
    part = running()
    part.feed(Polled(waiting=1, failed="rank 3 broke", lost=True))
    stop = part.directive
    assert isinstance(stop, Stop)
    assert (stop.kill, stop.cause.kind, stop.cause.detail) == (
        (True, CauseKind.FAILURE, "rank 3 broke")
    )


def test_failure_is_noted_at_once_and_charged_when_workers_ended() -> None:
    part = running()
    assert part.tells(failure=failure(1)) == (NoteFailure("it broke"),)
    assert part.tells(workers=Workers.STOPPING) == ()
    assert part.tells(workers=Workers.NONE) == (Join(charge=True, restarts=0),)
    part.feed(Joined(roster(2, restarts=1)))
    assert part.state.restarts == 1
    assert part.directive == Run(roster(2, 1), "me", 2)


def test_node_whose_workers_its_launcher_ended_joins_again_without_a_charge() -> None:
    part = running(3)
    assert part.tells(workers=Workers.NONE, cut_off_round=2) == ()
    assert part.tells(workers=Workers.NONE, cut_off_round=3) == (Join(charge=False, restarts=0),)
    assert isinstance(part.directive, Idle)


def test_spent_budget_closes_rendezvous_for_all() -> None:
    part = running(3, restarts=2)
    part.tells(failure=failure(3))
    orders = part.tells(workers=Workers.NONE)
    assert orders == (CloseAll("2 restarts are spent: node-1: it broke"),)
    assert isinstance(part.directive, Finish)
    assert part.directive.outcome.kind is OutcomeKind.FAILED
    assert part.directive.failure == failure(3)


@pytest.mark.parametrize("kind", [FailureClass.PEER_ABORT, FailureClass.MASTER_PORT])
def test_failures_caused_by_peers_are_charged_after_a_limit(kind: FailureClass) -> None:
    part = running()
    for number in range(1, UNCHARGED_IN_A_ROW + 2):
        part.tells(workers=Workers.NONE, round=number, failure=failure(number, kind))
        assert part.state.phase is Phase.JOINING
        charged = number > UNCHARGED_IN_A_ROW
        assert part.state.uncharged == (0 if charged else number)
        part.feed(Joined(roster(number + 1)))
        part.tells(workers=Workers.RUNNING, round=number + 1, failure=None)


def test_steady_round_resets_uncharged_failures() -> None:
    part = running()
    for number in range(1, UNCHARGED_IN_A_ROW + 3):
        part.tells(
            STEADY_SECONDS, workers=Workers.NONE, round=number,
            failure=failure(number, FailureClass.PEER_ABORT),
        )  # fmt: skip
        assert part.state.uncharged == 1
        part.feed(Joined(roster(number + 1)))
        part.tells(workers=Workers.RUNNING, round=number + 1, failure=None)


def test_done_agent_waits_for_others_and_succeeds_with_them() -> None:
    part = running()
    assert part.tells(workers=Workers.NONE, done=True) == (EnterExitBarrier(),)
    part.feed(Polled(waiting=1))
    assert part.state.phase is Phase.MEETING, "no new round for newcomers once somebody is done"
    part.feed(Polled(met=True))
    assert isinstance(part.directive, Finish)
    assert part.directive.outcome.kind is OutcomeKind.SUCCEEDED


@pytest.mark.parametrize("end", [BarrierTimedOut(), Polled(closed=True)])
def test_exit_barrier_ends(end: Event) -> None:
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    part.feed(end)
    assert isinstance(part.directive, Finish)
    assert part.directive.outcome.kind is OutcomeKind.SUCCEEDED


def test_agent_done_without_exit_barrier_reports_it() -> None:
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    part.feed(BarrierTimedOut("etcd did not answer"))
    assert part.directive == Finish(Outcome(OutcomeKind.SUCCEEDED, "etcd did not answer"))
    assert part.state.alone


def test_done_agents_rejoin_when_another_failed() -> None:
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    assert part.feed(Polled(waiting=1, failed="rank 3 broke")) == (Join(False, 0),)
    part.feed(Joined(roster(2)))
    assert part.directive == Run(roster(2), "me", 2)


def test_done_agents_rejoin_when_another_moved_on() -> None:
    """torch's agents leave no note of a failed worker."""
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    assert part.feed(Polled(waiting=1)) == ()
    assert part.feed(Polled(waiting=1, moved_on=True)) == (Join(False, 0),)
    part.feed(Joined(roster(2)))
    assert part.directive == Run(roster(2), "me", 2)


def test_completed_exit_barrier_precedes_moved_on_agents() -> None:
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    part.feed(Polled(waiting=1, moved_on=True, met=True))
    assert part.directive == Finish(Outcome(OutcomeKind.SUCCEEDED))


@pytest.mark.parametrize(
    ("ended", "kind"), [("", OutcomeKind.SUCCEEDED), ("3 are spent", OutcomeKind.FAILED)]
)
def test_rejoining_done_agent_may_find_rendezvous_closed(ended: str, kind: OutcomeKind) -> None:
    part = running()
    part.tells(workers=Workers.NONE, done=True)
    part.feed(Polled(waiting=1, moved_on=True))
    outcome = Outcome(kind, ended) if ended else None
    part.feed(NotJoined(JoinTrouble.CLOSED, "closed", outcome))
    assert isinstance(part.directive, Finish)
    assert part.directive.outcome == Outcome(kind, ended)


def test_note_of_failed_job_ends_agent() -> None:
    part = running()
    part.feed(Polled(closed=True))
    assert isinstance(part.directive, Run), "closed alone may be a peer that is done"
    part.feed(Polled(closed=True, ended="2 restarts are spent"))
    assert isinstance(part.directive, Finish)
    assert part.directive.outcome.kind is OutcomeKind.FAILED


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (JoinTrouble.LEFT, Left),
        (JoinTrouble.CLOSED, Refused),
        (JoinTrouble.ERROR, Refused),
        (JoinTrouble.UNSUPPORTED, Refused),
        (JoinTrouble.TIMEOUT, Finish),
    ],
)
def test_no_rank_assignment(trouble: JoinTrouble, expected: type) -> None:
    part = Part(LocalChanged(READY))
    part.feed(NotJoined(trouble, "why"))
    assert isinstance(part.directive, expected)


SUCCESS = Outcome(OutcomeKind.SUCCEEDED)
FAILURE = Outcome(OutcomeKind.FAILED, "3 are spent")


@pytest.mark.parametrize("outcome", [SUCCESS, FAILURE])
@pytest.mark.parametrize("trouble", [JoinTrouble.LEFT, JoinTrouble.CLOSED])
def test_agent_without_rank_assignment_ends_with_job_outcome(
    trouble: JoinTrouble, outcome: Outcome
) -> None:
    part = Part(LocalChanged(READY))
    part.feed(NotJoined(trouble, "why", outcome))
    assert part.directive == Finish(outcome)


def test_agent_with_earlier_failure_succeeds_with_the_job() -> None:
    part = running()
    part.tells(workers=Workers.NONE, failure=failure(1))
    part.feed(NotJoined(JoinTrouble.CLOSED, "closed", SUCCESS))
    assert part.directive == Finish(SUCCESS)


@pytest.mark.parametrize("failed", [True, False])
def test_close_between_two_rounds(failed: bool) -> None:
    part = running()
    part.feed(Polled(waiting=1))
    part.tells(workers=Workers.NONE, failure=failure(1) if failed else None)
    part.feed(NotJoined(JoinTrouble.CLOSED, "closed"))
    assert isinstance(part.directive, Finish)
    kind = OutcomeKind.FAILED if failed else OutcomeKind.STOPPED
    assert part.directive.outcome.kind is kind


def test_leaving_agent_waits_for_workers_and_notifies_handler() -> None:
    part = running()
    assert part.tells(leaving="SIGTERM", workers=Workers.STOPPING) == ()
    part.feed(Polled(waiting=3))
    assert isinstance(part.directive, Run), "who leaves is not told to stop by others"
    assert part.tells(workers=Workers.NONE) == (Depart(),)
    assert part.tells(workers=Workers.NONE, round=2) == ()
    part.feed(Departed())
    assert part.state.directive == Left()


def test_rank_assignment_after_leave_is_ignored() -> None:
    part = Part(LocalChanged(READY))
    assert part.tells(leaving="SIGTERM") == (Depart(),)
    part.feed(Joined(roster(1)))
    assert not isinstance(part.directive, Run)


def test_workers_of_lost_agent_end_first() -> None:
    part = Part()
    assert part.feed(LocalChanged(replace(READY, workers=Workers.RUNNING, round=4))) == ()
    assert isinstance(part.directive, Stop)
    assert part.directive.kill
    assert part.tells(workers=Workers.NONE) == (Join(False, 0),)
    assert part.state.number == 4


def test_round_overtaken_before_start_is_rejoined() -> None:
    part = Part(LocalChanged(READY), Joined(roster(1)), Polled(waiting=1))
    assert part.tells(round=1) == (Join(False, 0),)


def test_ended_agent_ignores_events() -> None:
    part = Part(LocalChanged(READY), NotJoined(JoinTrouble.ERROR, "why"))
    assert part.feed(LocalChanged(READY)) == ()
    assert part.feed(Joined(roster(1))) == ()
    assert isinstance(part.directive, Refused)


def test_round_end_without_failure_has_cause_loss_or_leave() -> None:
    part = running()
    part.feed(Polled(waiting=1, lost=True))
    assert part.directive.kill, "collectives with a node that is gone cannot end"
    assert part.directive.cause.kind is CauseKind.LOSS
    part = running()
    part.feed(Polled(waiting=1, lost=True, left="node-2"))
    assert not part.directive.kill
    assert (part.directive.cause.kind, part.directive.cause.members) == (
        CauseKind.LEAVE,
        ("node-2",),
    )


class Gone:
    """Handler and store with one node gone."""

    def __init__(self, *done: int) -> None:
        self.notes = {done_note(rank) for rank in done}

    def num_nodes_waiting(self) -> int:
        return 1

    def is_closed(self) -> bool:
        return False

    def gone(self) -> frozenset[int]:
        return frozenset({1})

    def check(self, keys: list[str]) -> bool:
        return self.notes.issuperset(keys)


@pytest.mark.parametrize(
    ("done", "met_at", "expected"), [((0,), "last", True), ((0, 1), "last", False), ((), "", False)]
)
def test_gone_member_moved_on_unless_done(
    done: tuple[int, ...], met_at: str, expected: bool
) -> None:
    one = Gone(*done)
    assert poll_round(one, one, met_at).moved_on is expected
