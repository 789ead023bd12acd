"""Local state of this node as reported to the rendezvous. A function of the state alone."""

from __future__ import annotations

from elasticjob_agent.core.asking import completed, saved, saves
from elasticjob_agent.core.model import Crew, State
from elasticjob_rendezvous.core.failures import ECHOES, Failure
from elasticjob_rendezvous.core.local import Local, Workers

REASON_CHARACTERS = 200


def local_facts(state: State) -> Local:
    """Return the complete local state, to be reported whenever it changes."""
    crew = state.crew
    training = crew if state.busy else None
    shown = state.shown if training is not None else None
    if shown is not None and shown.round != state.round:
        shown = None
    able = state.hello is not None and not state.gone and state.port > 0
    able = able and state.prepare_by is None
    return Local(
        ready=able,
        workers=_workers(state),
        round=state.round,
        failure=_failure(crew),
        done=crew is not None and crew.done,
        leaving=state.leaving,
        master_port=state.port,
        master_served=state.served,
        start_ms=0 if crew is None else crew.start_ms,
        first_step_ms=0 if crew is None else crew.first_step_ms,
        step=-1 if shown is None else shown.step,
        checkpoint_step=-1 if shown is None else shown.checkpoint_step,
        busy_ms=0 if shown is None else shown.busy_ms,
        saves=training is not None and saves(training),
        passed=-1 if training is None or training.asked is None else training.asked.passed,
        saved=training is not None and saved(training),
        completed=training is not None and completed(training),
        cold=_cold(state),
        live_until=None if state.hello is None else state.hello.live_until,
    )


def _cold(state: State) -> str | None:
    """Return the cold-start reason; None without warm start or if another agent did the start."""
    crew = state.crew
    if crew is None or not crew.start_ms or not state.facts.warm_start:
        return None
    return crew.cold_reason.strip().partition("\n")[0][:REASON_CHARACTERS]


def _failure(crew: Crew | None) -> Failure | None:
    """Return the first failure; an aborted collective only once all workers here have exited.

    The cause of the abort may be another worker of this node that exits a moment later, and the
    rendezvous keeps the first failure it receives. The workers are being killed in the meantime.
    """
    if crew is None or crew.failure is None:
        return None
    echo = crew.failure.kind in ECHOES
    return None if echo and not crew.empty else crew.failure


def _workers(state: State) -> Workers:
    crew = state.crew
    if crew is None or not state.busy:
        return Workers.NONE
    if crew.order is not None:
        return Workers.STOPPING
    return Workers.RUNNING if crew.started else Workers.STARTING
