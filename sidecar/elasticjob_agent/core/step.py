"""Step function of the agent: record one event, then reconcile the whole state.

`absorb` only records. `reconcile` compares the rendezvous' directive with the worker runtime,
from the state alone, so a lost, repeated or late event delays a command but does not change
it. The same holds for stop orders, with their cause and grace, and for the decision to end the
agent, with its exit codes and message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import assert_never

from elasticjob_agent.core import worker_group as groups
from elasticjob_agent.core.checkpoint_requests import (
    end_waiting_workers,
    record_resume,
    request_checkpoint,
    request_timeout_at,
    waits_to_save,
)
from elasticjob_agent.core.commands import (
    Command,
    Exit,
    PrepareGroup,
    Release,
    ReportLocal,
    ReservePort,
    StartGroup,
    StopGroup,
)
from elasticjob_agent.core.events import (
    DirectiveChanged,
    Event,
    LeaveRequested,
    PortReserved,
    RuntimeEvent,
    Timer,
    WorkersCounted,
    WorkersProgressed,
)
from elasticjob_agent.core.failures import SIGNALS
from elasticjob_agent.core.hang import DUMP_SECONDS, hangs_at, makes_no_progress
from elasticjob_agent.core.log_lines import log_lines
from elasticjob_agent.core.reports import (
    local_state,
    record_progress,
    report_due_at,
    report_progress,
)
from elasticjob_agent.core.state import (
    LEFT_CODE,
    Ending,
    ExitCode,
    State,
    StopCause,
    StopOrder,
    WorkerGroup,
)
from elasticjob_agent.worker_runtime import (
    Hello,
    LauncherSignalled,
    LogTrouble,
    Prepared,
    Started,
    StartRefused,
    Stopped,
    StoreServed,
    WorkerExited,
    WorkerRuntimeLost,
    WorkersStuck,
    WorkersSucceeded,
)
from elasticjob_rendezvous.protocol.directives import Finish, Left, Refused, Run, Stop
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import CauseKind, OutcomeKind

__all__ = ["step", "wake_at"]

LEAVE_SECONDS = 6.0
"""Maximum wait of a leaving node for confirmation; after that its lease expires."""
RELEASE_SECONDS = 5.0
"""Maximum time for a released launcher to exit."""
PREPARE_SECONDS = 75.0
"""Maximum wait of a new node for its preloaded interpreter, which may still be loading then."""


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Return the next state and the commands, in order. `now` is monotonic seconds."""
    if state.over:
        return state, ()
    seen = absorb(state, event, now)
    after, orders = reconcile(seen, event, now)
    return after, (*log_lines(state, after, event), *orders)


def wake_at(state: State) -> float | None:
    """Return the monotonic time of the next `Timer` event; None if nothing is due."""
    group = state.group
    leftovers = group.leftovers_at if group is not None else None
    hangs = hangs_at(state) if group is not None and group.order is None else None
    times = (
        state.leave_by,
        state.release_by,
        state.prepare_by,
        leftovers,
        hangs,
        report_due_at(state),
        request_timeout_at(state),
        state.saved_workers_until,
    )
    due = [at for at in times if at is not None]
    return None if state.over else min(due, default=None)


# -- facts --------------------------------------------------------------------------


def absorb(state: State, event: Event, now: float) -> State:
    """Record an event in the state."""
    match event:
        case DirectiveChanged(directive):
            state = _with_base_rank(_mark_as_run(replace(state, directive=directive)))
            begins = isinstance(directive, Run) and directive.roster.number > state.round
            return _leaving(state, state.stuck) if state.stuck and begins else state
        case RuntimeEvent():
            return _take_runtime_event(state, event, now)
        case LeaveRequested(reason, hurry):
            state = replace(state, is_urgent=state.is_urgent or hurry)
            return _leaving(state, reason)
        case PortReserved(port):
            return replace(state, port=port, served=False)
        case Timer():
            return state
        case WorkersCounted(workers):
            return replace(state, facts=replace(state.facts, slots=workers))
        case WorkersProgressed():
            return record_progress(state, event, now)
        case _:
            assert_never(event)


def _mark_as_run(state: State) -> State:
    """Mark a round that is stopped before its start here as a round that ran here.

    The rendezvous then knows that no worker of that round will start any more.
    """
    directive, group = state.directive, state.group
    if not isinstance(directive, Stop) or directive.round <= state.round:
        return state
    if group is not None and not group.empty:
        return state
    return replace(_with_last_group(state), group=None, ran=directive.round)


def _with_last_group(state: State) -> State:
    """Keep the facts about the ended group that outlive it."""
    group = state.group
    has_resumed = group is not None and group.resumed_at is not None
    return replace(
        state,
        past=state.ended_progress,
        past_cut_off=state.cut_off_round,
        past_resumed=state.past_resumed or has_resumed,
    )


def _with_base_rank(state: State) -> State:
    """Fill in the base rank of a worker group taken over without one, from its roster."""
    group, directive = state.group, state.directive
    if group is None or group.base_rank is not None or not isinstance(directive, Run):
        return state
    assignment = directive.roster.assignment(directive.member)
    if assignment is None or directive.roster.number != group.round:
        return state
    return replace(state, group=replace(group, base_rank=assignment.base_rank))


def _take_runtime_event(state: State, taken: RuntimeEvent, now: float) -> State:
    event, facts, group = taken.event, state.facts, state.group
    match event:
        case Hello():
            ran = state.ran if group is None or not group.started else state.round
            if state.hello is None:
                state = replace(state, prepare_by=_prepare_by(state, event, now))
            if group is not None and event.stuck and event.running is None:
                group = replace(group, empty=True)
            group = groups.after_hello(group, taken, event, facts, now)
            state = replace(state, hello=event, group=group, ran=ran)
            return _stuck(state, event.stuck) if event.stuck else state
        case Started() | WorkerExited() | StartRefused() | Stopped():
            if group is None or group.round != event.round:
                return state
            group = groups.with_progress(group, taken)
            return replace(state, group=groups.after_event(group, event, taken.reports, facts, now))
        case Prepared():
            return replace(state, prepare_by=None)
        case StoreServed(0):
            return replace(state, port=0, served=False) if state.served else state
        case StoreServed(port):
            return replace(state, port=port, served=True)
        case WorkersStuck(number, message):
            if group is not None and group.round == number:
                state = replace(state, group=replace(group, empty=True))
            return _stuck(state, message)
        case WorkersSucceeded(number):
            if group is None or group.round != number:
                return state
            return replace(state, group=replace(group, succeeded=True))
        case LauncherSignalled():
            return _leaving(state, "its launcher was asked to end")
        case WorkerRuntimeLost(reason):
            state = _leaving(state, f"its launcher is gone: {reason}")
            group = None if group is None else groups.without_runtime(group, facts, reason)
            return replace(state, gone=reason or "no reason given", group=group)
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


def _stuck(state: State, message: str) -> State:
    """Let the node leave: its machine can neither end these workers nor be trusted with others.

    If all workers here have succeeded, it ends with the job, unless another round begins.
    """
    if state.stuck:
        return state
    state = replace(state, stuck=message)
    if state.leaving and state.may_leave:
        return replace(state, leaving=f"{state.leaving}; {message}")
    is_done = state.group is not None and state.group.done
    return state if is_done else _leaving(state, message)


# -- orders -------------------------------------------------------------------------


def reconcile(state: State, event: Event, now: float) -> tuple[State, tuple[Command, ...]]:
    """Return the commands that the state requires: stop, start, report, end."""
    runtime_event = event.event if isinstance(event, RuntimeEvent) else None
    commands: list[Command] = []
    if isinstance(runtime_event, Hello | StoreServed) and state.port == 0:
        commands.append(ReservePort())
    if isinstance(runtime_event, Hello) and runtime_event.warms and state.facts.warm_start:
        commands.append(PrepareGroup())
    if state.prepare_by is not None and now >= state.prepare_by:
        state = replace(state, prepare_by=None)
    if state.leaving and state.leaving_at is None:
        state = replace(state, leaving_at=now)
    state = record_resume(end_waiting_workers(state, now), now)
    state, orders = _stop_commands(state, now, again=isinstance(runtime_event, Hello))
    commands.extend(orders)
    state, orders = _start_commands(state, now)
    commands.extend(orders)
    state, asks = request_checkpoint(state)
    commands.extend(asks)
    state = report_progress(state, now)
    local = local_state(state)
    if local != state.reported:
        state = replace(state, reported=local)
        commands.append(ReportLocal(local))
    state, orders = _end_if_decided(state, now)
    return state, (*commands, *orders)


def _stop_commands(state: State, now: float, again: bool) -> tuple[State, tuple[Command, ...]]:
    """Return the command to stop the worker group, if it is new or has changed, or `again` is set.

    A later order may shorten the grace period, and end the stop copies or the wait for a step.
    """
    group = state.group
    if group is None or group.empty or state.gone:
        return state, ()
    wanted = _wanted_stop(state, group, now)
    stands = group.order
    if stands is None and wanted is None:
        return state, ()
    order = stands or wanted
    assert order is not None
    if wanted is not None and wanted.grace_seconds < order.grace_seconds:
        order = replace(order, grace_seconds=wanted.grace_seconds)
    is_planned = order.cause in (StopCause.PLANNED, StopCause.LEAVE) and order.grace_seconds > 0
    order = replace(
        order,
        copies=order.copies and _may_run_again(state),
        ends_step=order.ends_step and is_planned and _others_continue(state),
    )
    if order != stands:
        state = replace(state, group=replace(group, order=order))
    elif not again:
        return state, ()
    command = StopGroup(group.round, order.grace_seconds, order.dump, order.copies, order.ends_step)
    return state, (command,)


def _may_run_again(state: State) -> bool:
    """Return True if another round may run here. Otherwise stop copies are useless: their memory is
    freed with the node or the job."""
    return not state.leaving and not isinstance(state.directive, Finish | Left | Refused)


def _others_continue(state: State) -> bool:
    """Return True if workers of other nodes must finish the current step, as the job continues.

    This is False for a job whose only node leaves.
    """
    match state.directive:
        case Run(roster=roster):
            return len(roster.seats) > 1
        case Stop():
            return True
    return False


def _wanted_stop(state: State, group: WorkerGroup, now: float) -> StopOrder | None:
    """Return the most urgent stop order for this worker group, or None to let it run."""
    return min(
        _stop_reasons(state, group, now), key=lambda order: order.grace_seconds, default=None
    )


def _stop_reasons(state: State, group: WorkerGroup, now: float) -> Iterator[StopOrder]:
    dumps = group.order is not None and group.order.dump
    hangs = hangs_at(state)
    if hangs is not None and now >= hangs:
        yield StopOrder(StopCause.HANG, DUMP_SECONDS)
    # Hanging workers get the time to dump their stacks, in spite of other events in the meantime.
    if group.failure is not None and not dumps:
        yield StopOrder(StopCause.FAILURE, 0.0)
    if state.leaving and not waits_to_save(state, group, now):
        grace = 0.0 if state.is_urgent else state.facts.stop_grace_seconds
        yield StopOrder(StopCause.LEAVE, grace)
    if group.leftovers_at is not None and now >= group.leftovers_at:
        yield StopOrder(StopCause.LEFTOVERS, state.facts.stop_grace_seconds)
    match state.directive:
        case Stop(number, kill, cause, grace) if group.round <= number:
            if not kill:
                yield StopOrder(StopCause.PLANNED, grace)
            elif cause.kind is CauseKind.FAILURE:
                if not dumps and makes_no_progress(state, now):
                    yield StopOrder(StopCause.HANG, DUMP_SECONDS)
                elif not dumps:
                    yield StopOrder(StopCause.PEER_FAILURE, 0.0)
            else:
                yield StopOrder(StopCause.URGENT, 0.0)
        case Run(roster=roster) if group.round < roster.number:
            yield StopOrder(StopCause.URGENT, 0.0)  # a later round is final: this one is obsolete
        case Finish(_, _, grace):
            yield StopOrder(StopCause.END, grace)
        case Left() | Refused():
            yield StopOrder(StopCause.END, 0.0)


def _start_commands(state: State, now: float) -> tuple[State, tuple[Command, ...]]:
    """Return the commands to start the round of the directive: once, after the last one's end."""
    directive = state.directive
    if not isinstance(directive, Run) or state.busy or state.leaving or state.ending is not None:
        return state, ()
    roster = directive.roster
    assignment = roster.assignment(directive.member)
    if assignment is None or state.hello is None or roster.number <= state.round:
        return state, ()
    group = WorkerGroup(roster.number, assignment.slots, assignment.base_rank, now)
    state = replace(_with_last_group(state), group=group, ran=state.round)
    if state.served:
        # The worker runtime reports when a store is used and when another is available.
        return state, (StartGroup(roster, assignment, directive.max_restarts),)
    return state, (StartGroup(roster, assignment, directive.max_restarts), ReservePort())


# -- the end ------------------------------------------------------------------------


def _end_if_decided(state: State, now: float) -> tuple[State, tuple[Command, ...]]:
    """Release the worker runtime once the end is decided and nothing runs; exit once it is gone."""
    if state.leaving and not state.busy and state.leave_by is None:
        state = replace(state, leave_by=now + LEAVE_SECONDS)
    if state.ending is None:
        ending = _decide_end(state, now)
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


def _decide_end(state: State, now: float) -> Ending | None:
    directive, run = state.directive, f"job {state.facts.run_id}"
    if state.busy:
        return None
    match directive:
        case Finish(reads_failure=True):
            return None
        case Finish():
            return _end_after_finish(state, run, directive)
        case Refused(reason):
            return Ending(ExitCode.RENDEZVOUS, ExitCode.RENDEZVOUS, f"{run} refused: {reason}")
        case Left():
            return _end_after_leave(state, run, "")
    late = state.leave_by is not None and now >= state.leave_by
    if state.leaving and state.hello is None:
        return _end_after_leave(state, run, "")  # this node never took part
    if state.leaving and (late or state.is_urgent):
        return _end_after_leave(
            state, run, "; no confirmation from the rendezvous: the lease will expire"
        )
    return None


def _end_after_leave(state: State, run: str, detail: str) -> Ending:
    reason = state.leaving or "released by the rendezvous"
    code = ExitCode.FAILED if state.gone else ExitCode.OK
    if state.stuck:
        code = ExitCode.STUCK
    return Ending(code, LEFT_CODE, f"{run}: {state.facts.name} left ({reason}){detail}")


def _end_after_finish(state: State, run: str, finish: Finish) -> Ending:
    outcome = finish.outcome
    detail = f": {outcome.detail}" if outcome.detail else ""
    match outcome.kind:
        case OutcomeKind.SUCCEEDED:
            return Ending(ExitCode.OK, ExitCode.OK, f"{run} succeeded{detail}")
        case OutcomeKind.FAILED:
            text = f"{run} failed{detail}"
            if finish.failure is not None:
                text += "\n" + _failure_text(finish.failure)
            return Ending(ExitCode.FAILED, ExitCode.FAILED, text)
        case OutcomeKind.TIMED_OUT:
            code = ExitCode.RENDEZVOUS
            return Ending(code, code, f"{run} timed out{detail}")
        case OutcomeKind.STOPPED:
            saved = "" if outcome.save is None else f"; {outcome.save.text}"
            stuck = f"; {state.stuck}" if state.stuck else ""
            text = f"{run} was stopped from outside{detail}{saved}{stuck}"
            # The pod of stuck workers outlives its deletion: the code explains it.
            code = ExitCode.STUCK if state.stuck else ExitCode.STOPPED
            return Ending(code, LEFT_CODE, text)
        case _:
            assert_never(outcome.kind)


def _failure_text(failure: Failure) -> str:
    """Return a readable description of the first failure: rank, exit and error message."""
    worker = f"rank {failure.rank} (local rank {failure.local_rank} on {failure.name})"
    if failure.signal is not None:
        detail = f"killed by {SIGNALS.get(failure.signal, f'signal {failure.signal}')}"
    elif failure.exit_code is not None:
        detail = f"exit code {failure.exit_code}"
    else:
        detail = "ended by the agent after its error"
    lines = [f"first failure: {worker} in round {failure.round}: {detail}, {failure.kind}"]
    if failure.message:
        lines.append(failure.message)
    if failure.traceback and failure.traceback.strip() != failure.message.strip():
        lines.append(failure.traceback)
    return "\n".join(lines)
