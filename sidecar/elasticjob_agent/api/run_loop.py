"""Run loop of an agent, and conversion of its ending to a result or exception of `run`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

from elasticjob_agent.agent import Agent
from elasticjob_agent.api.spec import (
    ProcessFailure,
    RunResult,
    SignalException,
    WorkerGroup,
    WorkerState,
)
from elasticjob_agent.core.poll_step import JoinTrouble
from elasticjob_agent.core.state import Ending, ExitCode, WorkerEnded
from elasticjob_agent.core.state import WorkerGroup as NodeGroup
from elasticjob_agent.polling.poll import trouble_of
from elasticjob_agent.worker_files import RunLogs
from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.protocol.directives import Finish, Left, Refused
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import OutcomeKind


class Runnable(Protocol):
    def run_in_loop(self) -> Coroutine[Any, Any, Ending]: ...

    def leave(self, reason: str) -> None: ...


def run_to_end(agent: Runnable) -> Ending:
    """Run an agent to its end in a new event loop.

    If a loop runs in this thread already, as in a notebook, the new one runs in another thread,
    and this call blocks until its end. Then no signals are handled; a KeyboardInterrupt makes the
    node leave before it is raised.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(agent.run_in_loop())
    with ThreadPoolExecutor(1, "elasticjob-agent") as threads:
        ending = threads.submit(lambda: asyncio.run(agent.run_in_loop()))
        try:
            return ending.result()
        except KeyboardInterrupt:
            agent.leave("KeyboardInterrupt")
            raise  # the end of the context waits for the thread


class PeriodicRecorder:
    """Context that calls `record` every `interval_seconds`, and once more on exit."""

    def __init__(self, record: Callable[[], None], interval_seconds: float) -> None:
        self._record = record
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._record()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            self._record()


def call_shutdown(
    shutdown: Callable[..., None], death_sig: signal.Signals | None, timeout: int
) -> None:
    """Call `_shutdown` with the arguments it accepts: older subclasses take no timeout."""
    takes = inspect.signature(shutdown).parameters.values()
    options: dict[str, Any] = {}
    if any(each.name == "timeout" or each.kind is each.VAR_KEYWORD for each in takes):
        options["timeout"] = timeout
    if death_sig is None:
        shutdown(**options)
    else:
        shutdown(death_sig, **options)


def run_result(
    ending: Ending,
    shell: Agent,
    group: WorkerGroup,
    return_values: Callable[[int], dict[int, Any]],
    error: Exception | None,
) -> RunResult:
    """Return the result of this node's workers.

    Args:
        ending: ending of the agent.
        shell: the agent.
        group: worker group, whose state is set.
        return_values: returns the workers' return values of a round, by global rank.
        error: exception of the handler if it gave no place.

    Raises:
        SignalException: a signal ended the agent.
        Exception: the rendezvous failed, or the agent itself did.
    """
    state = shell.progress.state
    directive, node_group = state.directive, state.group
    if ending.code is ExitCode.INTERNAL:
        group.state = WorkerState.UNKNOWN
        raise RuntimeError(ending.message)
    signalled = shell.signals.last
    if signalled is not None and not isinstance(directive, Finish):
        raise SignalException(f"the agent got {signalled.name}", signalled)
    if node_group is None and error is not None:  # independent of the outcome of the others
        if trouble_of(error) is not JoinTrouble.LEFT:
            raise error
        group.state = WorkerState.STOPPED
        return RunResult(WorkerState.STOPPED)
    match directive:
        case Finish(outcome) if outcome.kind is OutcomeKind.SUCCEEDED:
            if node_group is None:  # this node never had a place
                raise RendezvousClosedError(
                    "the run had succeeded before this node joined it: it cannot continue, and a "
                    "new run needs an id of its own"
                )
            group.state = WorkerState.SUCCEEDED
            values = return_values(node_group.round) if node_group.done else {}
            return RunResult(WorkerState.SUCCEEDED, values)
        case Finish(outcome, failure) if outcome.kind is OutcomeKind.FAILED:
            group.state = WorkerState.FAILED
            return RunResult(WorkerState.FAILED, {}, process_failures(shell, node_group, failure))
        case Finish(outcome) if outcome.kind is OutcomeKind.TIMED_OUT:
            raise error or RendezvousTimeoutError(outcome.detail)
        case Finish(outcome):
            raise error or RendezvousClosedError(f"{outcome.kind}: {outcome.detail}")
        case Refused(reason):
            raise error or RendezvousConnectionError(reason)
    if state.stuck or (state.gone and not isinstance(directive, Left)):
        group.state = WorkerState.UNKNOWN
        raise RuntimeError(ending.message)
    group.state = WorkerState.STOPPED
    return RunResult(WorkerState.STOPPED)


def process_failures(
    shell: Agent, node_group: NodeGroup | None, first: Failure | None
) -> dict[int, ProcessFailure]:
    """Return the failures by global rank.

    They are those of this node's workers that the agent did not end itself, and the job's first
    failure on any node.
    """
    found: dict[int, ProcessFailure] = {}
    logs = RunLogs(shell.settings.logs)
    if (
        node_group is not None
        and node_group.base_rank is not None
        and node_group.failure is not None
    ):
        own = node_group.failure
        for ended in node_group.exits:
            rank = node_group.base_rank + ended.exit.local_rank
            if (ended.during is None and ended.exit.exit_code != 0) or rank == own.rank:
                found[rank] = _own_failure(logs, node_group, ended, own)
        if own.rank not in found:
            found[own.rank] = _remote_failure(own)
    if first is not None and first.rank not in found:
        found[first.rank] = _remote_failure(first)
    return found


def _own_failure(
    logs: RunLogs, node_group: NodeGroup, ended: WorkerEnded, first: Failure
) -> ProcessFailure:
    exit_ = ended.exit
    path = logs.error_file(node_group.round, exit_.local_rank)
    code = -exit_.signal if exit_.signal is not None else exit_.exit_code
    failure = ProcessFailure(
        exit_.local_rank, exit_.pid, 1 if code is None else code, "" if path is None else str(path)
    )
    if not failure.has_report and exit_.local_rank == first.local_rank:
        failure.message = first.traceback or first.message
        failure.timestamp = first.at_ms // 1000
    return failure


def _remote_failure(failure: Failure) -> ProcessFailure:
    """Convert the reported failure of another node's worker, or of one that never ran."""
    code = -failure.signal if failure.signal is not None else failure.exit_code
    result = ProcessFailure(failure.local_rank, 0, 1 if code is None else code, "")
    result.message = failure.traceback or failure.message
    result.timestamp = failure.at_ms // 1000
    return result
