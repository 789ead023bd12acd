"""Step function of the agent: record one event, then reconcile the whole state.

`absorb` only records. `reconcile` compares the rendezvous' directive with the worker runtime,
from the state alone, so a lost, repeated or late event delays a command but does not change it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core import crew as crews
from elasticjob_agent.core.asking import asking, ended_after_all
from elasticjob_agent.core.ending import wake_at, with_end
from elasticjob_agent.core.local import local_facts
from elasticjob_agent.core.model import (
    Command,
    Crew,
    Directed,
    Event,
    FromHands,
    HoldPort,
    LeaveAsked,
    PortHeld,
    PrepareCrew,
    StartCrew,
    State,
    StopCrew,
    Tell,
    Timer,
    WorkersProgressed,
)
from elasticjob_agent.core.notes import notes
from elasticjob_agent.core.orders import wanted_order
from elasticjob_agent.core.showing import progressed, showing
from elasticjob_agent.hands import (
    HandsGone,
    Hello,
    LauncherSignalled,
    LogTrouble,
    Prepared,
    Started,
    StartRefused,
    Stopped,
    StoreServed,
    WorkerExited,
)
from elasticjob_rendezvous.core.directives import Run, Stop

__all__ = ["step", "wake_at"]

PREPARE_SECONDS = 75.0
"""Maximum wait of a new node for its preloaded interpreter; the launcher gives up sooner."""


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Return the next state and the commands, in order. `now` is monotonic seconds."""
    if state.over:
        return state, ()
    seen = absorb(state, event, now)
    after, orders = reconcile(seen, event, now)
    return after, (*notes(state, after, event), *orders)


# -- facts --------------------------------------------------------------------------


def absorb(state: State, event: Event, now: float) -> State:
    """Record an event in the state."""
    match event:
        case Directed(directive):
            return _seated(_voided(replace(state, directive=directive)))
        case FromHands():
            return _heard(state, event, now)
        case LeaveAsked(reason, hurry):
            state = replace(state, hurried=state.hurried or hurry)
            return _leaving(state, reason)
        case PortHeld(port):
            return replace(state, port=port, served=False)
        case Timer():
            return state
        case WorkersProgressed():
            return progressed(state, event, now)
        case _:
            assert_never(event)


def _voided(state: State) -> State:
    """Mark a round that is stopped before its start here as a round that ran here.

    This tells the rendezvous that no worker of that round will start any more.
    """
    directive, crew = state.directive, state.crew
    if not isinstance(directive, Stop) or directive.round <= state.round:
        return state
    if crew is not None and not crew.empty:
        return state
    return replace(state, crew=None, ran=directive.round)


def _seated(state: State) -> State:
    """Fill in the base rank of a worker group taken over without one, from its roster."""
    crew, directive = state.crew, state.directive
    if crew is None or crew.base_rank is not None or not isinstance(directive, Run):
        return state
    seat = directive.roster.seat(directive.member)
    if seat is None or directive.roster.number != crew.round:
        return state
    return replace(state, crew=replace(crew, base_rank=seat.base_rank))


def _heard(state: State, heard: FromHands, now: float) -> State:
    event, facts, crew = heard.event, state.facts, state.crew
    match event:
        case Hello():
            ran = state.ran if crew is None or not crew.started else state.round
            if state.hello is None:
                state = replace(state, prepare_by=_prepare_by(state, event, now))
            crew = crews.after_hello(crew, heard, event, facts, now)
            return replace(state, hello=event, crew=crew, ran=ran)
        case Started() | WorkerExited() | StartRefused() | Stopped():
            if crew is None or crew.round != event.round:
                return state
            crew = crews.with_words(crew, heard)
            return replace(state, crew=crews.after(crew, event, heard.reports, facts, now))
        case Prepared():
            return replace(state, prepare_by=None)
        case StoreServed(0):
            return replace(state, port=0, served=False) if state.served else state
        case StoreServed(port):
            return replace(state, port=port, served=True)
        case LauncherSignalled():
            return _leaving(state, "its launcher was told to end")
        case HandsGone(reason):
            state = _leaving(state, f"its launcher is gone: {reason}")
            crew = None if crew is None else crews.without_hands(crew, facts, reason)
            return replace(state, gone=reason or "no reason given", crew=crew)
        case LogTrouble():
            return state
        case _:
            assert_never(event)


def _prepare_by(state: State, hello: Hello, now: float) -> float | None:
    """Return the deadline up to which a new node prepares for warm starts before it takes part.

    The other nodes would wait for its slow start. They already wait for a node that has run
    workers, so such a node takes part at once.
    """
    fresh = hello.running is None and not hello.exits and state.round == 0
    return now + PREPARE_SECONDS if fresh and hello.warms and state.facts.warm_start else None


def _leaving(state: State, reason: str) -> State:
    return replace(state, leaving=state.leaving or reason) if state.may_leave else state


# -- orders -------------------------------------------------------------------------


def reconcile(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Return the commands that the state requires: stop, start, report, end."""
    heard = event.event if isinstance(event, FromHands) else None
    commands: list[Command] = []
    if isinstance(heard, Hello | StoreServed) and state.port == 0:
        commands.append(HoldPort())
    if isinstance(heard, Hello) and heard.warms and state.facts.warm_start:
        commands.append(PrepareCrew())
    if state.prepare_by is not None and now >= state.prepare_by:
        state = replace(state, prepare_by=None)
    if state.leaving and state.leaving_at is None:
        state = replace(state, leaving_at=now)
    state = ended_after_all(state, now)
    state, orders = _stopping(state, now, again=isinstance(heard, Hello))
    commands.extend(orders)
    state, orders = _starting(state, now)
    commands.extend(orders)
    state, asks = asking(state)
    commands.extend(asks)
    state = showing(state, now)
    local = local_facts(state)
    if local != state.told:
        state = replace(state, told=local)
        commands.append(Tell(local))
    state, orders = with_end(state, now)
    return state, (*commands, *orders)


def _stopping(state: State, now: float, again: bool) -> tuple[State, tuple[Command, ...]]:
    """Order the worker group's stop or shorten its grace; repeat the order after a reconnect."""
    crew = state.crew
    if crew is None or crew.empty or state.gone:
        return state, ()
    wanted = wanted_order(state, crew, now)
    stands = crew.order
    if stands is not None and (wanted is None or wanted.grace_seconds >= stands.grace_seconds):
        return state, (StopCrew(crew.round, stands.grace_seconds, stands.dump),) if again else ()
    if wanted is None:
        return state, ()
    order = wanted if stands is None else replace(stands, grace_seconds=wanted.grace_seconds)
    state = replace(state, crew=replace(crew, order=order))
    return state, (StopCrew(crew.round, order.grace_seconds, order.dump),)


def _starting(state: State, now: float) -> tuple[State, tuple[Command, ...]]:
    """Start the round of the directive: each number once, after the last round's processes exit."""
    directive = state.directive
    if not isinstance(directive, Run) or state.busy or state.leaving or state.ending is not None:
        return state, ()
    roster = directive.roster
    seat = roster.seat(directive.member)
    if seat is None or state.hello is None or roster.number <= state.round:
        return state, ()
    crew = Crew(roster.number, seat.slots, seat.base_rank, now)
    state = replace(state, crew=crew, ran=state.round)
    if state.served:
        # The worker runtime reports when a store is used and when another is available.
        return state, (StartCrew(roster, seat, directive.max_restarts),)
    return state, (StartCrew(roster, seat, directive.max_restarts), HoldPort())
