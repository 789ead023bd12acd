"""Next action of a node, for every operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_rendezvous.dynamic.core.decisions import (
    Action,
    Situation,
    applied,
    close,
    join,
    keep_alive,
    leave,
)
from elasticjob_rendezvous.dynamic.core.state import WORLD, State, without
from tests.unit.rendezvous.dynamic.builders import UTC_NOW, node, settings, situation, state

LATE: dict = {"now": 201.0}
WHOLE = state("ab", complete=True)
FULL = state("bcd", complete=True)


@pytest.mark.parametrize(
    ("s", "action"),
    [
        (situation(State()), Action.ADD_TO_PARTICIPANTS),
        (situation(state("bc")), Action.ADD_TO_PARTICIPANTS),
        (situation(state("b", waits="a")), Action.ADD_TO_PARTICIPANTS),
        (situation(state("bcd")), Action.SYNC),  # another node allows more than this one
        (situation(state("a")), Action.SYNC),
        (situation(state("a"), beat_due=True), Action.KEEP_ALIVE),
        (situation(state("a"), last_call_over=True), Action.SYNC),
        (situation(state("ab")), Action.SYNC),
        (situation(state("ab"), last_call_over=True), Action.MARK_COMPLETE),
        (situation(state("abc")), Action.MARK_COMPLETE),
        (situation(WHOLE), Action.FINISH),
        (situation(WHOLE, **LATE), Action.FINISH),
        (situation(without(state("cba", complete=True), [node("c")], settings())), Action.REJOIN),
        (situation(WHOLE, rejoins=True), Action.REJOIN),
        (situation(state("ab"), rejoins=True), Action.REJOIN),
        (situation(WHOLE, rejoins=True, **LATE), Action.ERROR_TIMEOUT),
        (situation(State(), rejoins=True), Action.ADD_TO_PARTICIPANTS),
        (situation(state("bc", complete=True)), Action.ADD_TO_WAIT_LIST),
        (situation(state("bc", waits="a", complete=True)), Action.SYNC),
        (situation(state("bc", waits="a", complete=True), beat_due=True), Action.KEEP_ALIVE),
        (situation(FULL), Action.ADD_TO_REDUNDANCY_LIST),
        (situation(state("bcd", waits="a", complete=True)), Action.ADD_TO_REDUNDANCY_LIST),
        (situation(state("bcd", spare="a", complete=True)), Action.SYNC),
        (situation(state("bcd", spare="a", complete=True), **LATE), Action.SYNC),
        (situation(state("bcd", spare="a", complete=True), beat_due=True), Action.KEEP_ALIVE),
        (situation(state("bc", spare="a", complete=True)), Action.ADD_TO_WAIT_LIST),
        (situation(state("bc", spare="a")), Action.ADD_TO_PARTICIPANTS),
        (situation(State(), **LATE), Action.ERROR_TIMEOUT),
        (situation(state("a"), **LATE), Action.ERROR_TIMEOUT),
        (situation(state("bc", waits="a", complete=True), **LATE), Action.ERROR_TIMEOUT),
        (situation(State(closed=True)), Action.ERROR_CLOSED),
        (situation(replace(WHOLE, closed=True)), Action.ERROR_CLOSED),
        (situation(state("b", spare="a", closed=True)), Action.ERROR_GRACEFUL_EXIT),
        (situation(State(closed=True), was_redundant=True), Action.ERROR_GRACEFUL_EXIT),
        (situation(state("a"), leaving=True), Action.ERROR_GRACEFUL_EXIT),
        (situation(State(closed=True), leaving=True), Action.ERROR_CLOSED),
    ],
)
def test_join_actions(s: Situation, action: Action) -> None:
    assert join(s) is action


@pytest.mark.parametrize(
    ("decide", "s", "action"),
    [
        (leave, situation(State()), Action.FINISH),
        (leave, situation(WHOLE), Action.REMOVE),
        (leave, situation(state("b", waits="a")), Action.REMOVE),
        (leave, situation(state("b", spare="a")), Action.REMOVE),
        (leave, situation(WHOLE, **LATE), Action.ERROR_TIMEOUT),
        (leave, situation(State(), **LATE), Action.FINISH),
        (close, situation(WHOLE), Action.MARK_CLOSED),
        (close, situation(WHOLE, **LATE), Action.ERROR_TIMEOUT),
        (close, situation(State(closed=True), **LATE), Action.FINISH),
        (keep_alive, situation(WHOLE), Action.FINISH),
        (keep_alive, situation(WHOLE, beat_due=True), Action.KEEP_ALIVE),
        (keep_alive, situation(WHOLE, beat_due=True, **LATE), Action.ERROR_TIMEOUT),
        (keep_alive, situation(state("b"), beat_due=True), Action.FINISH),  # given up as dead
    ],
)
def test_leave_close_and_keep_alive_actions(
    decide: Callable[[Situation], Action], s: Situation, action: Action
) -> None:
    assert decide(s) is action


WRITES = {
    Action.KEEP_ALIVE: lambda s: node("a") in s.last_heartbeats,
    Action.ADD_TO_PARTICIPANTS: lambda s: node("a") in s.participants,
    Action.ADD_TO_WAIT_LIST: lambda s: node("a") in s.wait_list,
    Action.ADD_TO_REDUNDANCY_LIST: lambda s: node("a") in s.redundancy_list,
    Action.REJOIN: lambda s: node("a") in s.participants,
    Action.REMOVE: lambda s: not s.knows(node("a")),
    Action.MARK_COMPLETE: lambda s: s.complete,
    Action.MARK_CLOSED: lambda s: s.closed,
}


@pytest.mark.parametrize("action", Action)
def test_every_action_has_its_write_or_none(action: Action) -> None:
    s = situation(state("b"))
    if action in WRITES:
        assert WRITES[action](applied(action, s))
    else:
        with pytest.raises(ValueError, match="writes nothing"):
            applied(action, s)


@pytest.mark.parametrize(
    ("participants", "number", "action"),
    [
        ("ab", 0, Action.SYNC),
        ("abc", 0, Action.MARK_COMPLETE),
        ("abcd", 0, Action.MARK_COMPLETE),
        ("abc", 1, Action.SYNC),
    ],
)
def test_first_round_waits_for_expected_nodes(
    participants: str, number: int, action: Action
) -> None:
    expects = replace(settings(max_nodes=8), expected_nodes=3)
    assert join(situation(state(participants, round=number), settings=expects)) is action


class TestRecovery:
    """Rounds with a recovery call: one that follows another waits for no other nodes."""

    SETTINGS = replace(settings(), recovery_call=timedelta(seconds=3))

    def open(self, after: int = 2, number: int = 3, **parts: str) -> State:
        return state(**{"participants": "ab", **parts}, round=number, extra={WORLD: (after, 3)})

    def decided(self, of: State, **facts: Any) -> Action:
        return join(situation(of, settings=self.SETTINGS, **facts))

    def test_round_completes_when_all_nodes_are_back(self) -> None:
        assert self.decided(self.open()) is Action.MARK_COMPLETE
        assert join(situation(self.open())) is Action.SYNC, "without it, as the reference"

    def test_round_waits_for_returning_nodes(self) -> None:
        assert self.decided(self.open(waits="c")) is Action.SYNC
        assert self.decided(self.open(spare="c")) is Action.SYNC
        assert self.decided(self.open(waits="c"), last_call_over=True) is Action.MARK_COMPLETE

    def test_too_few_returned_nodes_wait(self) -> None:
        assert self.decided(self.open(participants="a")) is Action.SYNC

    def test_unknown_previous_members_are_not_waited_for(self) -> None:
        assert self.decided(state("ab")) is Action.SYNC
        assert self.decided(self.open(after=0)) is Action.SYNC

    def test_last_call_after_the_first_round_is_shorter(self) -> None:
        for number, seconds in ((0, 30), (1, 3)):
            s = situation(state("b", round=number), settings=self.SETTINGS)
            deadline = applied(Action.ADD_TO_PARTICIPANTS, s).deadline
            assert deadline is not None
            assert round((deadline - UTC_NOW).total_seconds()) == seconds


def test_node_with_later_round_number_continues_from_it() -> None:
    """The store was lost, and a newcomer recreated it."""
    fresh = state("b", round=0, deadline=UTC_NOW)
    after = applied(Action.ADD_TO_PARTICIPANTS, situation(fresh, least_round=6))
    assert after.round == 6
    assert after.deadline is not None
    assert after.deadline > UTC_NOW
    assert applied(Action.ADD_TO_PARTICIPANTS, situation(fresh, least_round=0)).round == 0
    alone = replace(state("a", complete=True), round=2)
    assert applied(Action.REJOIN, situation(alone, least_round=6)).round == 6
