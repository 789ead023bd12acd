"""Decisions of a node, based on the shared state and the time. No I/O.

One function per operation (join, leave, close, keep alive) maps a situation to an action, and
`applied` maps an action to the state to write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import assert_never

from elasticjob_rendezvous.dynamic.core import state as shared
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State


class Action(StrEnum):
    """Next action of a node. The actions up to MARK_CLOSED write the state."""

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
    """Input of a decision.

    Args:
        node: the deciding node.
        state: shared state without dead nodes.
        settings: settings of the rendezvous.
        now: monotonic time in seconds.
        utc: wall-clock time for the written state.
        deadline: end of the operation, monotonic time in seconds.
        beat_due: True if a heartbeat is due.
        last_call_over: True if the last call of the open round has ended.
        rejoins: True if the node's present rank precedes this operation.
        was_redundant: True if the node stood by during this operation.
        leaving: True if a shutdown was requested during this operation.
        least_round: first round after all rounds in which the node had a rank.
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
    """Decide the next step to a rank in a complete round. After an error the node must `leave`."""
    state, node = s.state, s.node
    spare = node in state.redundancy_list
    if state.closed:
        never_needed = spare or s.was_redundant
        return Action.ERROR_GRACEFUL_EXIT if never_needed else Action.ERROR_CLOSED
    if s.leaving:
        return Action.ERROR_GRACEFUL_EXIT
    full = len(state.participants) >= s.settings.max_nodes
    if spare:  # no timeout: to stand by is not a failure
        if full:
            return _idle(s)
        return Action.ADD_TO_WAIT_LIST if state.complete else Action.ADD_TO_PARTICIPANTS
    takes_part = node in state.participants
    has_rank = shared.assignment(state, node) is not None and not s.rejoins
    if state.complete and takes_part and has_rank:
        return Action.FINISH
    if s.now > s.deadline:
        return Action.ERROR_TIMEOUT
    if takes_part and (state.complete or s.rejoins):
        return Action.REJOIN
    if state.complete:
        if full:  # also from the wait list: a node there makes the others rejoin
            return Action.ADD_TO_REDUNDANCY_LIST
        return _idle(s) if node in state.wait_list else Action.ADD_TO_WAIT_LIST
    if not takes_part:
        return Action.SYNC if full else Action.ADD_TO_PARTICIPANTS
    enough = len(state.participants) >= s.settings.min_nodes
    if enough and (full or s.last_call_over or _all_are_here(s) or _all_are_back(s)):
        return Action.MARK_COMPLETE
    return _idle(s)


def _all_are_here(s: Situation) -> bool:
    """Return True if the expected nodes, if known, have joined the first round."""
    expected = s.settings.expected_nodes
    return expected is not None and s.state.round == 0 and len(s.state.participants) >= expected


def _all_are_back(s: Situation) -> bool:
    """Return True if a recovery round need not wait for further nodes.

    Requires `recovery_call`, a complete round before this one whose nodes have all joined or
    gone, and no waiting or redundant nodes.
    """
    if s.settings.recovery_call is None or s.state.wait_list or s.state.redundancy_list:
        return False
    return shared.follows_on(s.state)


def leave(s: Situation) -> Action:
    """Decide the next step to the node's removal from every list."""
    if not s.state.knows(s.node):
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.REMOVE


def close(s: Situation) -> Action:
    """Decide the next step to a closed rendezvous."""
    if s.state.closed:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.MARK_CLOSED


def keep_alive(s: Situation) -> Action:
    """Write a heartbeat, only if it is due and the node is still listed."""
    if not s.beat_due or s.node not in s.state.last_heartbeats:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if s.now > s.deadline else Action.KEEP_ALIVE


def applied(action: Action, s: Situation) -> State:
    """Return the state to write for an action that writes."""
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
