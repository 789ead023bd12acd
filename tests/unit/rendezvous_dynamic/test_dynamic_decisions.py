"""What a node does next, for every operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
from elasticjob_rendezvous.dynamic.core.state import State, without
from tests.unit.rendezvous_dynamic.builders import node, settings, situation, state

LATE: dict = {"now": 201.0}
WHOLE = state("ab", complete=True)
FULL = state("bcd", complete=True)


@pytest.mark.parametrize(
    ("s", "action"),
    [
        (situation(State()), Action.ADD_TO_PARTICIPANTS),
        (situation(state("bc")), Action.ADD_TO_PARTICIPANTS),
        (situation(state("b", waits="a")), Action.ADD_TO_PARTICIPANTS),
        (situation(state("bcd")), Action.SYNC),  # somebody allows more than we do
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
def test_join(s: Situation, action: Action) -> None:
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
def test_leave_close_and_keep_alive(
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
def test_every_action_writes_what_it_says_or_nothing(action: Action) -> None:
    s = situation(state("b"))
    if action in WRITES:
        assert WRITES[action](applied(action, s))
    else:
        with pytest.raises(ValueError, match="writes nothing"):
            applied(action, s)
