"""State, events, orders and step function of an agent that polls a torch `RendezvousHandler`.

A handler gives no directives. It only returns a place in a round, the number of waiting nodes, and
True if it is closed. `poll_step` derives from these answers and the agent's local state the
directives that the v3 engine would give. `elasticjob_agent.polling.handler_rendezvous` does the
I/O: it polls the handler and executes the orders.

A handler does not distinguish the reasons for a node's departure, so ElasticJob agents leave
each other notes in a round's store: a worker failed (the others' collectives cannot finish),
the job failed (no node should wait for it), or a node left and was not lost. torch's agents
neither write nor read these notes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from elasticjob_rendezvous.protocol.directives import (
    Directive,
    Finish,
    Idle,
    Left,
    Refused,
    Run,
    Stop,
)
from elasticjob_rendezvous.protocol.records.failures import ECHOES, Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

NOT_BEGUN = Idle("the launcher is not connected yet")
NO_LOCAL_STATE = Local()


class Phase(StrEnum):
    OUT = "out"  # no place, none requested yet
    JOINING = "joining"  # a place is requested from the handler
    SEATED = "seated"  # a place in a round
    STOPPING = "stopping"  # this node's workers of the round are stopping
    MEETING = "meeting"  # own workers are done, waiting at the exit barrier
    DEPARTING = "departing"  # the leave is being reported to the handler
    OVER = "over"


class JoinTrouble(StrEnum):
    """Reason for which a handler gave no place."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    LEFT = "left"  # `shutdown` or `leave` of the handler was called
    UNSUPPORTED = "unsupported"  # the rendezvous backend can never serve this agent
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PollingTerms:
    """Constants: identity of this agent, the job's restart budget, the grace of a planned stop.

    `name` is the display name.
    """

    member: str
    run_id: str
    max_restarts: int
    stop_grace_seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class PollingState:
    """State of an agent that polls a handler.

    Args:
        number: last round in which this agent had a place.
        restarts: failures charged to the job so far.
        uncharged: consecutive failures that were not charged.
        noted: round whose failure this agent has noted for the others.
        alone: True if this agent ended as done without knowledge of the others.
    """

    terms: PollingTerms
    phase: Phase = Phase.OUT
    directive: Directive = NOT_BEGUN
    local: Local = NO_LOCAL_STATE
    number: int = 0
    seated_at: float = 0.0
    restarts: int = 0
    uncharged: int = 0
    noted: int = 0
    alone: bool = False


# -- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalChanged:
    """Local state of this node changed."""

    local: Local


@dataclass(frozen=True, slots=True)
class Joined:
    """Place in a round; `roster.restarts` is the count that all members agreed on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class NotJoined:
    """Lack of a place; `outcome` is the job's outcome as far as its last rounds show it."""

    trouble: JoinTrouble
    detail: str
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Polled:
    """Result of polling the handler and the notes in the round's store.

    Args:
        waiting: number of nodes that wait for the next round; also positive if the round lost one.
        closed: True if the rendezvous is closed.
        failed: note that a worker failed; empty without one.
        ended: note that the job failed; empty without one.
        met: True if all members have reached the exit barrier.
        lost: True if a node of this round is gone and does not wait for another round.
        left: name of a node that left, from its note; empty without one.
        moved_on: True if a node of this round requests a newer round or is in one.
    """

    waiting: int = 0
    closed: bool = False
    failed: str = ""
    ended: str = ""
    met: bool = False
    lost: bool = False
    left: str = ""
    moved_on: bool = False


@dataclass(frozen=True, slots=True)
class BarrierTimedOut:
    """Exit barrier timed out; `unknown` is the reason if the others' result is unknown."""

    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Departed:
    """Leave reported to the handler."""


Event = LocalChanged | Joined | NotJoined | Polled | BarrierTimedOut | Departed


# -- orders -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Order: request a place in the next round; `charge` charges the failure of the last round."""

    charge: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Order: leave the others a note that a worker failed."""

    text: str


@dataclass(frozen=True, slots=True)
class EnterExitBarrier:
    """Order: enter the exit barrier. The answer is `Polled(met=True)` or `BarrierTimedOut`."""


@dataclass(frozen=True, slots=True)
class CloseAll:
    """Order: leave the others a note that the job failed, and close the rendezvous."""

    text: str


@dataclass(frozen=True, slots=True)
class Depart:
    """Order: report the leave to the handler. The answer is `Departed`."""


Order = Join | NoteFailure | EnterExitBarrier | CloseAll | Depart


UNCHARGED_IN_A_ROW = 3
"""Maximum number of consecutive failures attributed to other nodes before one is charged."""
STEADY_SECONDS = 60.0
"""Duration of a round that resets the count of uncharged failures."""


def poll_step(
    state: PollingState, event: Event, now: float
) -> tuple[PollingState, tuple[Order, ...]]:
    """Return the next state and the orders. `now` is monotonic seconds."""
    if state.phase is Phase.OVER:
        return state, ()
    match event:
        case LocalChanged(local):
            return _local_changed(replace(state, local=local), now)
        case Joined(roster):
            return _joined(state, roster, now)
        case NotJoined():
            return _not_joined(state, event)
        case Polled():
            return _polled(state, event)
        case BarrierTimedOut(unknown):
            return (_succeeded(state, unknown) if state.phase is Phase.MEETING else state), ()
        case Departed():
            return _end_with(state, Left()), ()
        case _:
            assert_never(event)


def _local_changed(state: PollingState, now: float) -> tuple[PollingState, tuple[Order, ...]]:
    local, phase = state.local, state.phase
    idle = local.workers is Workers.NONE
    if local.leaving:
        if not idle or phase is Phase.DEPARTING:
            return state, ()
        return replace(state, phase=Phase.DEPARTING), (Depart(),)
    if phase is Phase.OUT:
        return _begin(state)
    if phase not in (Phase.SEATED, Phase.STOPPING) or local.round != state.number:
        return state, ()
    if local.done:
        return replace(state, phase=Phase.MEETING), (EnterExitBarrier(),)
    orders: tuple[Order, ...] = ()
    if local.failure is not None and state.noted < state.number:
        state = replace(state, noted=state.number)
        orders = (NoteFailure(local.failure.message or str(local.failure.kind)),)
    if not idle:
        return state, orders
    if local.failure is None:
        ended = phase is Phase.STOPPING or local.cut_off_round == state.number
        return _rejoin(state) if ended else (state, ())
    after, more = _failed(state, local.failure, now)
    return after, (*orders, *more)


def _begin(state: PollingState) -> tuple[PollingState, tuple[Order, ...]]:
    """Request the first place once nothing runs here; stop workers left by an earlier agent."""
    local = state.local
    if local.workers is not Workers.NONE:
        cause = Cause(CauseKind.LOSS, detail="their agent was lost, and its place with it")
        directive = Stop(local.round, True, cause, 0.0)
        return replace(state, directive=directive, number=local.round), ()
    if not local.ready:
        return state, ()
    return _rejoin(replace(state, number=max(state.number, local.round)))


def _rejoin(state: PollingState, charge: bool = False) -> tuple[PollingState, tuple[Order, ...]]:
    directive = Idle("seeking a place in the next round")
    state = replace(state, phase=Phase.JOINING, directive=directive)
    return state, (Join(charge, state.restarts),)


def _failed(
    state: PollingState, failure: Failure, now: float
) -> tuple[PollingState, tuple[Order, ...]]:
    """Charge a failure or not; rejoin, or end the job when the restart budget is spent.

    An aborted collective is charged to the node of its cause, a port in use to none. The number of
    consecutive uncharged failures is limited, so that a permanent fault of these kinds ends.
    """
    row = 0 if now - state.seated_at >= STEADY_SECONDS else state.uncharged
    others = failure.kind in ECHOES or failure.kind is FailureClass.MASTER_PORT
    if others and row < UNCHARGED_IN_A_ROW:
        return _rejoin(replace(state, uncharged=row + 1))
    budget = state.terms.max_restarts
    if state.restarts < budget:
        return _rejoin(replace(state, uncharged=0), charge=True)
    text = f"{budget} restarts are spent"
    finish = Finish(Outcome(OutcomeKind.FAILED, text), failure, 0.0)
    return _end_with(state, finish), (CloseAll(f"{text}: {failure.name}: {failure.message}"),)


def _joined(
    state: PollingState, roster: Roster, now: float
) -> tuple[PollingState, tuple[Order, ...]]:
    if state.phase is not Phase.JOINING:
        return state, ()
    terms = state.terms
    directive = Run(roster, terms.member, terms.max_restarts)
    state = replace(
        state,
        phase=Phase.SEATED,
        directive=directive,
        number=roster.number,
        restarts=roster.restarts,
        seated_at=now,
    )
    return state, ()


def _not_joined(state: PollingState, event: NotJoined) -> tuple[PollingState, tuple[Order, ...]]:
    if state.phase is not Phase.JOINING:
        return state, ()
    trouble, detail = event.trouble, event.detail
    spare = trouble in (JoinTrouble.LEFT, JoinTrouble.CLOSED) and not state.local.leaving
    if spare and event.outcome is not None:
        return _end_with(state, Finish(event.outcome, _own_failure(state, event.outcome))), ()
    match trouble:
        case JoinTrouble.LEFT:
            return _end_with(state, Left()), ()
        case JoinTrouble.TIMEOUT:
            return _end_with(state, Finish(Outcome(OutcomeKind.TIMED_OUT, detail))), ()
        case JoinTrouble.CLOSED if state.number > 0:
            return _end_with(state, _closed(state, detail)), ()
        case JoinTrouble.CLOSED | JoinTrouble.UNSUPPORTED | JoinTrouble.ERROR:
            return _end_with(state, Refused(detail)), ()
        case _:
            assert_never(trouble)


def _closed(state: PollingState, detail: str) -> Finish:
    """Return the outcome if the others ended, without a note, while this node was between rounds.

    This node may have finished its last round.
    """
    failure = state.local.failure
    if failure is not None:
        return Finish(Outcome(OutcomeKind.FAILED, detail), failure, 0.0)
    if state.local.done:
        return Finish(Outcome(OutcomeKind.SUCCEEDED))
    return Finish(Outcome(OutcomeKind.STOPPED, detail), None, 0.0)


def _own_failure(state: PollingState, outcome: Outcome) -> Failure | None:
    """Return this node's failure if the job failed, possibly because of it."""
    return state.local.failure if outcome.kind is OutcomeKind.FAILED else None


def _polled(state: PollingState, seen: Polled) -> tuple[PollingState, tuple[Order, ...]]:
    if state.phase not in (Phase.SEATED, Phase.MEETING) or state.local.leaving:
        return state, ()
    if seen.ended:
        return _end_with(state, Finish(Outcome(OutcomeKind.FAILED, seen.ended), None, 0.0)), ()
    if state.phase is Phase.MEETING:
        if seen.met or seen.closed:
            return _succeeded(state), ()
        # Peers start a new round without this node, or wait for its removal: a failure among
        # them did not end the job. torch's agents leave no note of a failure.
        new_round = seen.moved_on or (seen.failed and seen.waiting)
        return _rejoin(state) if new_round else (state, ())
    if seen.failed:
        return _stop(state, True, Cause(CauseKind.FAILURE, detail=seen.failed)), ()
    if seen.waiting > 0:
        cause = _cause(seen)
        return _stop(state, cause.kind is CauseKind.LOSS, cause), ()
    return state, ()


def _cause(seen: Polled) -> Cause:
    """Return the cause of the end of a round without a failed worker."""
    if seen.left:
        return Cause(CauseKind.LEAVE, (seen.left,))
    if seen.lost:
        return Cause(CauseKind.LOSS, detail="a node of the round is gone")
    one = seen.waiting == 1
    many = "1 node waits" if one else f"{seen.waiting} nodes wait"
    return Cause(CauseKind.JOIN, detail=f"{many} for a round, or one was lost")


def _stop(state: PollingState, kill: bool, cause: Cause) -> PollingState:
    grace = 0.0 if kill else state.terms.stop_grace_seconds
    return replace(state, phase=Phase.STOPPING, directive=Stop(state.number, kill, cause, grace))


def _succeeded(state: PollingState, unknown: str = "") -> PollingState:
    state = replace(state, alone=bool(unknown))
    return _end_with(state, Finish(Outcome(OutcomeKind.SUCCEEDED, unknown)))


def _end_with(state: PollingState, directive: Directive) -> PollingState:
    return replace(state, phase=Phase.OVER, directive=directive)
