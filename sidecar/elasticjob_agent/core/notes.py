"""Log lines for the agent's transitions, one per transition."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_agent.core.asking import is_unasked
from elasticjob_agent.core.classify import ending_text
from elasticjob_agent.core.model import (
    Crew,
    Directed,
    Event,
    FromHands,
    LeaveAsked,
    Note,
    State,
)
from elasticjob_agent.hands import HandsGone, Hello, LogTrouble, Prepared, WorkerExited
from elasticjob_rendezvous.core.directives import Directive, Idle, Stop
from elasticjob_rendezvous.core.records import Cause

LINE_CHARACTERS = 160
TOOK_OVER = "took over round"
"""Begin of the line of an agent that continues a round of its predecessor."""


def notes(before: State, after: State, event: Event) -> Iterator[Note]:
    """Yield the log lines for one step."""
    match event:
        case Directed(directive) if directive != before.directive:
            yield from _directive(directive, before)
        case FromHands(heard):
            yield from _hands(before, after, heard)
        case LeaveAsked(reason) if not after.leaving:
            yield Note(f"ignoring the request to leave, the agent is already ending: {reason}")
    if after.leaving and not before.leaving:
        yield Note(f"leaving: {after.leaving}")
    if after.crew is not None:
        yield from _crew(before.crew, after.crew)


def _directive(directive: Directive, before: State) -> Iterator[Note]:
    match directive:
        case Idle(reason):
            yield Note(f"waiting: {reason}")
        case Stop(number, kill, cause):
            how = "at once" if kill else f"with {directive.grace_seconds:g} s of grace"
            yield Note(f"stopping workers of round {number} {how}: {cause_text(cause)}")
            if not kill and is_unasked(before, number):
                yield Note(
                    f"round {number} stops without the checkpoint that its workers want: all ranks "
                    "of all nodes must call should_checkpoint or on_leave, and a leaving node "
                    "needs more than 5 s for it",
                    warning=True,
                )


def _hands(before: State, after: State, heard: object) -> Iterator[Note]:
    match heard:
        case Hello() if after.crew is not None and before.crew is None:
            state = "still run" if after.busy else "ended meanwhile"
            pids = ", ".join(str(pid) for _, pid in sorted(heard.pids.items()))
            which = f" (pids {pids})" if pids else ""
            yield Note(f"{TOOK_OVER} {after.crew.round}: its workers {state}{which}")
        case HandsGone(reason) if before.ending is None:
            yield Note(f"the launcher is gone: {reason}", warning=not before.leaving)
        case Prepared(ready, reason):
            yield Note("workers will start warm" if ready else f"workers will start cold: {reason}")
        case LogTrouble(message):
            yield Note(f"worker logs are incomplete: {message}", warning=True)
        case WorkerExited() if after.crew is not None:
            yield _exit(after.crew, heard)


def _exit(crew: Crew, exit_: WorkerExited) -> Note:
    who = f"local rank {exit_.local_rank}"
    if crew.base_rank is not None:
        who = f"rank {crew.base_rank + exit_.local_rank} ({who}, pid {exit_.pid})"
    failed = crew.failure is not None and crew.failure.local_rank == exit_.local_rank
    return Note(f"round {exit_.round}: {who} ended: {ending_text(exit_)}", warning=failed)


def _crew(before: Crew | None, after: Crew) -> Iterator[Note]:
    same = before is not None and before.round == after.round
    known = before if same else None
    if known is None and not after.started:
        last = "" if after.base_rank is None else f"-{after.base_rank + after.slots - 1}"
        yield Note(f"round {after.round}: starting ranks {after.base_rank}{last}")
    if after.started and known is not None and not known.started:
        how = f"cold: {after.cold_reason}" if after.cold_reason else "warm"
        yield Note(
            f"round {after.round}: {after.slots} workers run after {after.start_ms} ms, {how}"
        )
    if after.failure is not None and (known is None or known.failure != after.failure):
        failure = after.failure
        yield Note(
            f"round {after.round}: rank {failure.rank} failed ({failure.kind}): "
            f"{_line(failure.message)}",
            warning=True,
        )
    if after.empty and not (known is not None and known.empty):
        end = "done" if after.done else "no worker is left"
        if after.obeyed:
            end = "workers exited after the requested checkpoint, not counted as success"
        yield Note(f"round {after.round}: {end}")


def cause_text(cause: Cause) -> str:
    """Return a short text for a cause."""
    names = f" of {', '.join(cause.members)}" if cause.members else ""
    detail = f": {_line(cause.detail)}" if cause.detail else ""
    return f"{cause.kind}{names}{detail}"


def _line(text: str) -> str:
    """Return the first line of a text, cut to the length of a log line."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"
