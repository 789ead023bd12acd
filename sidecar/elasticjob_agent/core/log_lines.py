"""Log lines of the agent: one for each fact that a step has changed. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_agent.core.checkpoint_requests import (
    completed,
    is_unasked,
    save_error,
    waits_to_restore,
)
from elasticjob_agent.core.commands import LogLine
from elasticjob_agent.core.events import (
    DirectiveChanged,
    Event,
    LeaveRequested,
    RuntimeEvent,
    WorkersCounted,
)
from elasticjob_agent.core.failures import ending_text
from elasticjob_agent.core.state import State, WorkerGroup
from elasticjob_agent.worker_runtime import (
    Hello,
    LogTrouble,
    Prepared,
    WorkerExited,
    WorkerRuntimeLost,
    WorkersStuck,
    WorkersSucceeded,
)
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Idle, Stop
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport
from elasticjob_rendezvous.protocol.records.members import Cause, Outcome, OutcomeKind

LINE_CHARACTERS = 160
TOOK_OVER = "took over round"
"""Beginning of the log line of an agent that continues a round of its predecessor."""


def log_lines(before: State, after: State, event: Event) -> Iterator[LogLine]:
    """Yield the log lines for one step."""
    match event:
        case DirectiveChanged(directive) if directive != before.directive:
            yield from _directive_lines(directive, before)
        case RuntimeEvent(runtime_event):
            yield from _runtime_lines(before, after, runtime_event)
        case WorkersCounted(workers):
            yield LogLine(f"this node runs {workers} worker{'s' * (workers > 1)}")
        case LeaveRequested(reason) if not after.leaving:
            yield LogLine(f"ignoring the request to leave, the agent is already ending: {reason}")
    if after.leaving and not before.leaving:
        yield LogLine(f"leaving: {after.leaving}")
        if after.busy and after.group is not None and waits_to_restore(after, after.group):
            yield LogLine(
                f"workers of round {after.group.round} run on until all nodes have restored: the "
                "memory of this node may have the only copy of the newest snapshot"
            )
    if after.group is not None:
        yield from _group_lines(before.group, after.group)


def _directive_lines(directive: Directive, before: State) -> Iterator[LogLine]:
    match directive:
        case Idle(reason):
            yield LogLine(f"waiting: {reason}")
        case Stop(number, kill, cause):
            how = "at once" if kill else f"with {directive.grace_seconds:g} s of grace"
            yield LogLine(f"stopping workers of round {number} {how}: {cause_text(cause)}")
            if not kill and is_unasked(before, number):
                yield LogLine(
                    f"round {number} stops without the checkpoint that its workers want: all ranks "
                    "of all nodes must call should_checkpoint or on_leave, and a leaving node "
                    "needs more than 5 s for it",
                    warning=True,
                )
            error = _failed_save(before, number)
            if not kill and error:
                yield LogLine(
                    f"round {number} stops without a checkpoint in storage: {error}", warning=True
                )
        case Finish(Outcome(kind=OutcomeKind.STOPPED, save=SaveReport() as save)):
            yield LogLine(f"the job is closed: {save.text}", warning=not save.complete)


def _failed_save(state: State, number: int) -> str:
    """Return the error of the round's requested checkpoint if its workers could not write it."""
    group = state.group
    if group is None or group.round != number or completed(group):
        return ""
    return save_error(group)


def _runtime_lines(before: State, after: State, event: object) -> Iterator[LogLine]:
    match event:
        case Hello() if after.group is not None and before.group is None:
            state = "still run" if after.busy else "ended meanwhile"
            pids = ", ".join(str(pid) for _, pid in sorted(event.pids.items()))
            which = f" (pids {pids})" if pids else ""
            yield LogLine(f"{TOOK_OVER} {after.group.round}: its workers {state}{which}")
        case WorkerRuntimeLost(reason) if before.ending is None:
            yield LogLine(f"the launcher is gone: {reason}", warning=not before.leaving)
        case WorkersStuck(number, message):
            yield LogLine(f"round {number}: {message}", warning=True)
        case Prepared(ready, reason):
            yield LogLine(
                "workers will start warm" if ready else f"workers will start cold: {reason}"
            )
        case WorkersSucceeded(number):
            yield LogLine(f"round {number}: all workers succeeded; the rest of the command runs")
        case LogTrouble(message):
            yield LogLine(f"worker logs are incomplete: {message}", warning=True)
        case WorkerExited() if after.group is not None:
            yield _exit_line(after.group, event)


def _exit_line(group: WorkerGroup, exit_: WorkerExited) -> LogLine:
    worker = f"local rank {exit_.local_rank}"
    if group.base_rank is not None:
        worker = f"rank {group.base_rank + exit_.local_rank} ({worker}, pid {exit_.pid})"
    failed = group.failure is not None and group.failure.local_rank == exit_.local_rank
    return LogLine(f"round {exit_.round}: {worker} ended: {ending_text(exit_)}", warning=failed)


def _group_lines(before: WorkerGroup | None, after: WorkerGroup) -> Iterator[LogLine]:
    same = before is not None and before.round == after.round
    known = before if same else None
    if known is None and not after.started:
        last = "" if after.base_rank is None else f"-{after.base_rank + after.slots - 1}"
        yield LogLine(f"round {after.round}: starting ranks {after.base_rank}{last}")
    if after.started and known is not None and not known.started:
        how = f"cold: {after.cold_reason}" if after.cold_reason else "warm"
        run = "worker runs" if after.slots == 1 else "workers run"
        yield LogLine(f"round {after.round}: {after.slots} {run} after {after.start_ms} ms, {how}")
    if after.failure is not None and (known is None or known.failure != after.failure):
        failure = after.failure
        yield LogLine(
            f"round {after.round}: rank {failure.rank} failed ({failure.kind}): "
            f"{_first_line(failure.message)}",
            warning=True,
        )
    if after.empty and not (known is not None and known.empty):
        end = "done" if after.done else "no worker is left"
        if after.saved_and_exited:
            end = "workers exited after the requested checkpoint, not counted as success"
        yield LogLine(f"round {after.round}: {end}")


def cause_text(cause: Cause) -> str:
    """Return a short text for a cause."""
    names = f" of {', '.join(cause.members)}" if cause.members else ""
    detail = f": {_first_line(cause.detail)}" if cause.detail else ""
    return f"{cause.kind}{names}{detail}"


def _first_line(text: str) -> str:
    """Return the first line of a text, cut to the length of a log line."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 1] + "…"
