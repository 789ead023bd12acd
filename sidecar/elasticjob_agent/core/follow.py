"""Step function of an agent that polls a handler; see `core.following`."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core.following import (
    CloseAll,
    Depart,
    Departed,
    Event,
    Following,
    Join,
    Joined,
    Meet,
    NoteFailure,
    NotJoined,
    Order,
    Phase,
    Seen,
    Told,
    Trouble,
    Waited,
)
from elasticjob_rendezvous.core.directives import Directive, Finish, Idle, Left, Refused, Run, Stop
from elasticjob_rendezvous.core.failures import ECHOES, Failure, FailureClass
from elasticjob_rendezvous.core.local import Workers
from elasticjob_rendezvous.core.records import Cause, CauseKind, Outcome, OutcomeKind
from elasticjob_rendezvous.core.roster import Roster

UNCHARGED_IN_A_ROW = 3
"""Maximum number of consecutive failures attributed to other nodes before one is charged."""
STEADY_SECONDS = 60.0
"""Duration of a round that resets the count of uncharged failures."""


def follow(state: Following, event: Event, now: float) -> tuple[Following, tuple[Order, ...]]:
    """Return the next state and the orders. `now` is monotonic seconds."""
    if state.phase is Phase.OVER:
        return state, ()
    match event:
        case Told(local):
            return _told(replace(state, local=local), now)
        case Joined(roster):
            return _joined(state, roster, now)
        case NotJoined():
            return _not_joined(state, event)
        case Seen():
            return _seen(state, event)
        case Waited(unknown):
            return (_succeeded(state, unknown) if state.phase is Phase.MEETING else state), ()
        case Departed():
            return _over(state, Left()), ()
        case _:
            assert_never(event)


def _told(state: Following, now: float) -> tuple[Following, tuple[Order, ...]]:
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
        return replace(state, phase=Phase.MEETING), (Meet(),)
    orders: tuple[Order, ...] = ()
    if local.failure is not None and state.noted < state.number:
        state = replace(state, noted=state.number)
        orders = (NoteFailure(local.failure.message or str(local.failure.kind)),)
    if not idle:
        return state, orders
    if local.failure is None:
        return _rejoin(state) if phase is Phase.STOPPING else (state, ())
    after, more = _failed(state, local.failure, now)
    return after, (*orders, *more)


def _begin(state: Following) -> tuple[Following, tuple[Order, ...]]:
    """Request the first seat once nothing runs here; stop workers left by an earlier agent."""
    local = state.local
    if local.workers is not Workers.NONE:
        cause = Cause(CauseKind.LOSS, detail="their agent was lost, and its place with it")
        directive = Stop(local.round, True, cause, 0.0)
        return replace(state, directive=directive, number=local.round), ()
    if not local.ready:
        return state, ()
    return _rejoin(replace(state, number=max(state.number, local.round)))


def _rejoin(state: Following, charge: bool = False) -> tuple[Following, tuple[Order, ...]]:
    directive = Idle("seeking a place in the next round")
    state = replace(state, phase=Phase.JOINING, directive=directive)
    return state, (Join(charge, state.restarts),)


def _failed(state: Following, failure: Failure, now: float) -> tuple[Following, tuple[Order, ...]]:
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
    return _over(state, finish), (CloseAll(f"{text}: {failure.name}: {failure.message}"),)


def _joined(state: Following, roster: Roster, now: float) -> tuple[Following, tuple[Order, ...]]:
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


def _not_joined(state: Following, event: NotJoined) -> tuple[Following, tuple[Order, ...]]:
    if state.phase is not Phase.JOINING:
        return state, ()
    trouble, detail = event.trouble, event.detail
    spare = trouble in (Trouble.LEFT, Trouble.CLOSED) and not state.local.leaving
    if spare and event.outcome is not None:
        return _over(state, Finish(event.outcome, _ours(state, event.outcome))), ()
    match trouble:
        case Trouble.LEFT:
            return _over(state, Left()), ()
        case Trouble.TIMEOUT:
            return _over(state, Finish(Outcome(OutcomeKind.TIMED_OUT, detail))), ()
        case Trouble.CLOSED if state.number > 0:
            return _over(state, _closed(state, detail)), ()
        case Trouble.CLOSED | Trouble.UNSUPPORTED | Trouble.ERROR:
            return _over(state, Refused(detail)), ()
        case _:
            assert_never(trouble)


def _closed(state: Following, detail: str) -> Finish:
    """Return the outcome if the others ended, without a note, while this node was between rounds.

    This node may have finished its last round.
    """
    failure = state.local.failure
    if failure is not None:
        return Finish(Outcome(OutcomeKind.FAILED, detail), failure, 0.0)
    if state.local.done:
        return Finish(Outcome(OutcomeKind.SUCCEEDED))
    return Finish(Outcome(OutcomeKind.STOPPED, detail), None, 0.0)


def _ours(state: Following, outcome: Outcome) -> Failure | None:
    """Return this node's failure if the job failed, possibly because of it."""
    return state.local.failure if outcome.kind is OutcomeKind.FAILED else None


def _seen(state: Following, seen: Seen) -> tuple[Following, tuple[Order, ...]]:
    if state.phase not in (Phase.SEATED, Phase.MEETING) or state.local.leaving:
        return state, ()
    if seen.ended:
        return _over(state, Finish(Outcome(OutcomeKind.FAILED, seen.ended), None, 0.0)), ()
    if state.phase is Phase.MEETING:
        if seen.met or seen.closed:
            return _succeeded(state), ()
        # Peers start a new round without this node, or wait for its removal: a failure among
        # them did not end the job. torch's agents leave no note of a failure.
        anew = seen.moved_on or (seen.failed and seen.waiting)
        return _rejoin(state) if anew else (state, ())
    if seen.failed:
        return _stop(state, True, Cause(CauseKind.FAILURE, detail=seen.failed)), ()
    if seen.waiting > 0:
        cause = _cause(seen)
        return _stop(state, cause.kind is CauseKind.LOSS, cause), ()
    return state, ()


def _cause(seen: Seen) -> Cause:
    """Return the cause of the end of a round without a failed worker."""
    if seen.left:
        return Cause(CauseKind.LEAVE, (seen.left,))
    if seen.lost:
        return Cause(CauseKind.LOSS, detail="a node of the round is gone")
    one = seen.waiting == 1
    many = "1 node waits" if one else f"{seen.waiting} nodes wait"
    return Cause(CauseKind.JOIN, detail=f"{many} for a round, or one was lost")


def _stop(state: Following, kill: bool, cause: Cause) -> Following:
    grace = 0.0 if kill else state.terms.stop_grace_seconds
    return replace(state, phase=Phase.STOPPING, directive=Stop(state.number, kill, cause, grace))


def _succeeded(state: Following, unknown: str = "") -> Following:
    state = replace(state, alone=bool(unknown))
    return _over(state, Finish(Outcome(OutcomeKind.SUCCEEDED, unknown)))


def _over(state: Following, directive: Directive) -> Following:
    return replace(state, phase=Phase.OVER, directive=directive)
