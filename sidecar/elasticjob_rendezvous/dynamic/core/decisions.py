"""What a node does next, decided from the shared state and the time.

One function for each operation (join, exit, close, keep alive) maps a situation to an
action, and `applied` maps an action to the state to write. Nothing here reads or writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import assert_never

from elasticjob_rendezvous.dynamic.core import state as shared
from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import State


class Action(StrEnum):
    """What to do next. Those up to MARK_CLOSED write the state."""

    KEEP_ALIVE = "KeepAlive"
    ADD_TO_PARTICIPANTS = "AddToParticipants"
    ADD_TO_WAIT_LIST = "AddToWaitList"
    ADD_TO_REDUNDANCY_LIST = "AddToRedundancyList"
    REJOIN = "Rejoin"
    REMOVE = "Remove"
    MARK_COMPLETE = "MarkComplete"
    MARK_CLOSED = "MarkClosed"
    SYNC = "Sync"
    FINISH = "Finish"
    ERROR_CLOSED = "ErrorClosed"
    ERROR_TIMEOUT = "ErrorTimeout"
    ERROR_GRACEFUL_EXIT = "ErrorGracefulExit"


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on.

    Args:
        node: who decides.
        state: the shared state, the dead already removed.
        settings: of the rendezvous.
        now: monotonic seconds.
        utc: the wall clock, to write.
        deadline: when the operation must have ended, monotonic seconds.
        beat_due: it is time for a heartbeat.
        last_call_over: the last call of the open round has ended.
        rejoins: a place that the node has is one of before this operation.
        was_redundant: the node was told to stand by during this operation.
        leaving: the node was asked to shut down meanwhile.
        least_round: the first round that is newer than any the node had a place in.
    """

    node: NodeDesc
    state: State
    settings: RendezvousSettings
    now: float
    utc: datetime
    deadline: float
    beat_due: bool = False
    last_call_over: bool = False
    rejoins: bool = False
    was_redundant: bool = False
    leaving: bool = False
    least_round: int = 0


def join(s: Situation) -> Action:
    """Towards a place in a complete round. After an error the node has yet to `leave`."""
    state, node = s.state, s.node
    spare = node in state.redundancy_list
    if state.closed:
        never_needed = spare or s.was_redundant
        return Action.ERROR_GRACEFUL_EXIT if never_needed else Action.ERROR_CLOSED
    if s.leaving:
        return Action.ERROR_GRACEFUL_EXIT
    full = len(state.participants) >= s.settings.max_nodes
    if spare:  # without a time limit: whoever stands by is no failure
        if full:
            return _idle(s)
        return Action.ADD_TO_WAIT_LIST if state.complete else Action.ADD_TO_PARTICIPANTS
    takes_part = node in state.participants
    good = shared.seat(state, node) is not None and not s.rejoins
    if state.complete and takes_part and good:
        return Action.FINISH
    if s.now > s.deadline:
        return Action.ERROR_TIMEOUT
    if takes_part and (state.complete or s.rejoins):
        return Action.REJOIN
    if state.complete:
        if full:  # also from the wait list, where it would make the others rejoin in vain
            return Action.ADD_TO_REDUNDANCY_LIST
        return _idle(s) if node in state.wait_list else Action.ADD_TO_WAIT_LIST
    if not takes_part:
        return Action.SYNC if full else Action.ADD_TO_PARTICIPANTS
    enough = len(state.participants) >= s.settings.min_nodes
    if enough and (full or s.last_call_over or _all_are_here(s) or _all_are_back(s)):
        return Action.MARK_COMPLETE
    return _idle(s)


def _all_are_here(s: Situation) -> bool:
    """The first round waits for nobody beyond those that are expected, where that is known."""
    expected = s.settings.expected_nodes
    return expected is not None and s.state.round == 0 and len(s.state.participants) >= expected


def _all_are_back(s: Situation) -> bool:
    """A recovery waits for nobody else, where `recovery_call` is set: this round follows on
    another, whose nodes have all come or gone, and nobody stands by."""
    if s.settings.recovery_call is None or s.state.wait_list or s.state.redundancy_list:
        return False
    return shared.follows_on(s.state)


def leave(s: Situation) -> Action:
    """Out of every list."""
    if not s.state.knows(s.node):
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.REMOVE


def close(s: Situation) -> Action:
    """Closed for all."""
    if s.state.closed:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.MARK_CLOSED


def keep_alive(s: Situation) -> Action:
    """One heartbeat, if the others still count us in."""
    if not s.beat_due or s.node not in s.state.last_heartbeats:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.KEEP_ALIVE


def applied(action: Action, s: Situation) -> State:
    """The state to write for an action that writes."""
    state, node = s.state, s.node
    match action:
        case Action.KEEP_ALIVE:
            return shared.alive(state, node, s.utc)
        case Action.ADD_TO_PARTICIPANTS:
            return shared.joined(state, node, s.settings, s.utc, s.least_round)
        case Action.ADD_TO_WAIT_LIST:
            return shared.waiting(state, node, s.utc)
        case Action.ADD_TO_REDUNDANCY_LIST:
            return shared.redundant(state, node, s.utc)
        case Action.REJOIN:
            return shared.rejoined(state, node, s.settings, s.utc, s.least_round)
        case Action.REMOVE:
            return shared.without(state, [node], s.settings)
        case Action.MARK_COMPLETE:
            return shared.completed(state, s.settings.lasting_store)
        case Action.MARK_CLOSED:
            return replace(state, closed=True)
        case (
            Action.SYNC
            | Action.FINISH
            | Action.ERROR_CLOSED
            | Action.ERROR_TIMEOUT
            | Action.ERROR_GRACEFUL_EXIT
        ):
            raise ValueError(f"{action} writes nothing")
        case _:
            assert_never(action)


def _idle(s: Situation) -> Action:
    due = s.beat_due and s.node in s.state.last_heartbeats
    return Action.KEEP_ALIVE if due else Action.SYNC
