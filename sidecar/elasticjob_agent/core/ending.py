"""Decision to end the agent: exit codes and final message."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core.asking import unasked_at
from elasticjob_agent.core.classify import SIGNALS
from elasticjob_agent.core.hang import hangs_at
from elasticjob_agent.core.model import (
    LEFT_CODE,
    Command,
    Ending,
    Exit,
    ExitCode,
    Release,
    State,
)
from elasticjob_agent.core.showing import shows_at
from elasticjob_rendezvous.core.directives import Finish, Left, Refused
from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.records import OutcomeKind

LEAVE_SECONDS = 6.0
"""Maximum wait of a leaving node for confirmation; after that its lease expires."""
RELEASE_SECONDS = 5.0
"""Maximum time for a released launcher to exit."""


def wake_at(state: State) -> float | None:
    """Return the monotonic time of the next `Timer` event; None if nothing is due."""
    crew = state.crew
    leftovers = crew.leftovers_at if crew is not None else None
    hangs = hangs_at(state) if crew is not None and crew.order is None else None
    times = (
        state.leave_by,
        state.release_by,
        state.prepare_by,
        leftovers,
        hangs,
        shows_at(state),
        unasked_at(state),
        state.obeyed_until,
    )
    due = [at for at in times if at is not None]
    return None if state.over else min(due, default=None)


def with_end(state: State, now: float) -> tuple[State, tuple[Command, ...]]:
    """Release the worker runtime once the end is decided and nothing runs; exit once it is gone."""
    if state.leaving and not state.busy and state.leave_by is None:
        state = replace(state, leave_by=now + LEAVE_SECONDS)
    if state.ending is None:
        ending = _decided(state, now)
        if ending is None:
            return state, ()
        state = replace(state, ending=ending, leave_by=None)
        if not state.gone and state.hello is not None:
            state = replace(state, release_by=now + RELEASE_SECONDS)
            return state, (Release(ending.launcher_code, ending.message),)
    assert state.ending is not None
    waits = state.release_by is not None and now < state.release_by
    if waits and not state.gone:
        return state, ()
    return replace(state, over=True), (Exit(state.ending),)


def _decided(state: State, now: float) -> Ending | None:
    directive, run = state.directive, f"job {state.facts.run_id}"
    if state.busy:
        return None
    match directive:
        case Finish():
            return _finished(run, directive)
        case Refused(reason):
            return Ending(ExitCode.RENDEZVOUS, ExitCode.RENDEZVOUS, f"{run} refused: {reason}")
        case Left():
            return _left(state, run, "")
    late = state.leave_by is not None and now >= state.leave_by
    if state.leaving and state.hello is None:
        return _left(state, run, "")  # this node never took part
    if state.leaving and (late or state.hurried):
        return _left(state, run, "; no confirmation from the rendezvous: the lease will expire")
    return None


def _left(state: State, run: str, how: str) -> Ending:
    why = state.leaving or "released by the rendezvous"
    code = ExitCode.FAILED if state.gone else ExitCode.OK
    return Ending(code, LEFT_CODE, f"{run}: {state.facts.name} left ({why}){how}")


def _finished(run: str, finish: Finish) -> Ending:
    outcome = finish.outcome
    detail = f": {outcome.detail}" if outcome.detail else ""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return Ending(ExitCode.OK, ExitCode.OK, f"{run} succeeded{detail}")
        case OutcomeKind.FAILED:
            text = f"{run} failed{detail}"
            if finish.failure is not None:
                text += "\n" + failure_text(finish.failure)
            return Ending(ExitCode.FAILED, ExitCode.FAILED, text)
        case OutcomeKind.TIMED_OUT:
            code = ExitCode.RENDEZVOUS
            return Ending(code, code, f"{run} timed out{detail}")
        case OutcomeKind.STOPPED:
            return Ending(ExitCode.STOPPED, LEFT_CODE, f"{run} was stopped from outside{detail}")
        case _:
            assert_never(outcome.kind)


def failure_text(failure: Failure) -> str:
    """Return a readable description of the first failure: rank, exit and error message."""
    who = f"rank {failure.rank} (local rank {failure.local_rank} on {failure.name})"
    if failure.signal is not None:
        how = f"killed by {SIGNALS.get(failure.signal, f'signal {failure.signal}')}"
    elif failure.exit_code is not None:
        how = f"exit code {failure.exit_code}"
    else:
        how = "ended by the agent after its error"
    lines = [f"first failure: {who} in round {failure.round}: {how}, {failure.kind}"]
    if failure.message:
        lines.append(failure.message)
    if failure.traceback and failure.traceback.strip() != failure.message.strip():
        lines.append(failure.traceback)
    return "\n".join(lines)
