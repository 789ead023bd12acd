"""Checkpoint requests to this node's workers before a planned stop, and their answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticjob.layout import Request
from elasticjob_agent.core.model import AskCrew, Asked, Crew, State
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_rendezvous.core.directives import Run
from elasticjob_rendezvous.core.records import Save
from elasticjob_rendezvous.core.saving import ASK_SECONDS


def asking(state: State) -> tuple[State, tuple[AskCrew, ...]]:
    """Forward the rendezvous' save request to the running worker group, each request once."""
    crew, save = state.crew, _request(state)
    if crew is None or crew.empty or crew.order is not None or save is None:
        return state, ()
    if crew.asked is not None and crew.asked.point == save.point:
        return state, ()
    first = Asked(save.point, crew.progress)
    asked = first if crew.asked is None else replace(crew.asked, point=save.point)
    state = replace(state, crew=replace(crew, asked=asked))
    return state, (AskCrew(crew.round, Request(save.point, save.seconds)),)


def answered(asked: Asked | None, progress: Mapping[int, WorkerProgress]) -> Asked | None:
    """Record the last save point passed: no worker passes another while a request is in place."""
    if asked is None or asked.passed >= 0:
        return asked
    return replace(asked, passed=max((worker.points for worker in progress.values()), default=0))


def ended_after_all(state: State, now: float) -> State:
    """Count workers that saved and exited as done if the end of their round does not follow.

    This happens when peers finished before the save point.
    """
    until, crew = state.obeyed_until, state.crew
    if until is None or crew is None or now < until:
        return state
    return replace(state, crew=replace(crew, asked=None))


def waits_to_save(state: State, crew: Crew, now: float) -> bool:
    """Return True if a leaving node's workers keep running because the job may save first."""
    if state.hurried or state.leaving_at is None or not _is_to_be_asked(state, crew):
        return False
    return _request(state) is not None or now < state.leaving_at + ASK_SECONDS


def is_unasked(state: State, number: int) -> bool:
    """Return True if that round's workers want to save before a planned stop but were not asked."""
    crew = state.crew
    if crew is None or crew.round != number or crew.empty or crew.asked is not None:
        return False
    return _is_to_be_asked(state, crew) and _request(state) is None


def unasked_at(state: State) -> float | None:
    """Return the monotonic time at which workers stop waiting for a save request and are ended."""
    crew = state.crew
    if crew is None or crew.empty or crew.order is not None or _request(state) is not None:
        return None
    if state.leaving_at is None or not waits_to_save(state, crew, state.leaving_at):
        return None
    return state.leaving_at + ASK_SECONDS


def saves(crew: Crew) -> bool:
    """Return True if a script here wants to save before a planned stop."""
    return any(worker.saves for worker in crew.progress.values())


def completed(crew: Crew) -> bool:
    """Return True if a worker here has reported a checkpoint since the request."""
    asked = crew.asked
    if asked is None or asked.point == 0:
        return False
    workers = ((asked.before.get(rank), worker) for rank, worker in crew.progress.items())
    return any(
        _told(before or WorkerProgress(), worker)
        # Progress in text form has no save points.
        and (worker.points == 0 or worker.points >= asked.point)
        for before, worker in workers
    )


def saved(crew: Crew) -> bool:
    """Return True if all workers here have passed the agreed save point or exited.

    A worker that reports its checkpoints does not count: it may still be writing this one.
    """
    asked = crew.asked
    if asked is None or asked.point == 0:
        return False
    ended = {found.exit.local_rank for found in crew.exits}
    workers = [(rank, worker) for rank, worker in crew.progress.items() if worker.saves]
    return all(
        worker.points > asked.point and not asked.before.get(rank, worker).checkpoints
        for rank, worker in workers
        if rank not in ended
    )


def _told(before: WorkerProgress, now: WorkerProgress) -> bool:
    more = now.checkpoints > before.checkpoints or now.saved_ns != before.saved_ns
    return more or now.checkpoint_step != before.checkpoint_step


def _is_to_be_asked(state: State, crew: Crew) -> bool:
    """Return True if workers want to save before a planned stop and the round supports it."""
    directive = state.directive
    if not isinstance(directive, Run) or crew.round != directive.roster.number:
        return False
    return directive.asks and saves(crew)


def _request(state: State) -> Save | None:
    """Return the rendezvous' save request for the worker group's round."""
    directive, crew = state.directive, state.crew
    if not isinstance(directive, Run) or crew is None or crew.round != directive.roster.number:
        return None
    return directive.save
