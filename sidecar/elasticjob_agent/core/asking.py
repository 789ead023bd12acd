"""Asking this node's workers to save before a planned stop, and what they answer. Pure."""

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
    """Hand on what the rendezvous asks of the running crew, each word once."""
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
    """After what the workers said once the request was in its place: none passes more now."""
    if asked is None or asked.passed >= 0:
        return asked
    return replace(asked, passed=max((worker.points for worker in progress.values()), default=0))


def ended_after_all(state: State, now: float) -> State:
    """Where nobody ends the round in which workers saved and ended, as where peers were done
    before that place, they are done too.
    """
    until, crew = state.obeyed_until, state.crew
    if until is None or crew is None or now < until:
        return state
    return replace(state, crew=replace(crew, asked=None))


def waits_to_save(state: State, crew: Crew, now: float) -> bool:
    """Whether the workers of a node that leaves run on, for the gang may save first."""
    if state.hurried or state.leaving_at is None or not _is_to_be_asked(state, crew):
        return False
    return _request(state) is not None or now < state.leaving_at + ASK_SECONDS


def is_unasked(state: State, number: int) -> bool:
    """Whether workers of that round want to save before a planned stop, and nobody asked them."""
    crew = state.crew
    if crew is None or crew.round != number or crew.empty or crew.asked is not None:
        return False
    return _is_to_be_asked(state, crew) and _request(state) is None


def unasked_at(state: State) -> float | None:
    """When workers that wait to be asked are ended unasked; monotonic seconds."""
    crew = state.crew
    if crew is None or crew.empty or crew.order is not None or _request(state) is not None:
        return None
    if state.leaving_at is None or not waits_to_save(state, crew, state.leaving_at):
        return None
    return state.leaving_at + ASK_SECONDS


def saves(crew: Crew) -> bool:
    """Whether a script here wants to save before a planned stop."""
    return any(worker.saves for worker in crew.progress.values())


def completed(crew: Crew) -> bool:
    """Whether a worker here told of a checkpoint since all were asked for it."""
    asked = crew.asked
    if asked is None or asked.point == 0:
        return False
    workers = ((asked.before.get(rank), worker) for rank, worker in crew.progress.items())
    return any(
        _told(before or WorkerProgress(), worker)
        # A text names no places.
        and (worker.points == 0 or worker.points >= asked.point)
        for before, worker in workers
    )


def saved(crew: Crew) -> bool:
    """Whether all workers here came past the agreed place, or ended.

    One that tells its checkpoints may still be writing this one.
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
    """Whether workers want to save before a planned stop, in a round in which that is asked."""
    directive = state.directive
    if not isinstance(directive, Run) or crew.round != directive.roster.number:
        return False
    return directive.asks and saves(crew)


def _request(state: State) -> Save | None:
    """What the rendezvous asks of the crew's round."""
    directive, crew = state.directive, state.crew
    if not isinstance(directive, Run) or crew is None or crew.round != directive.roster.number:
        return None
    return directive.save
