"""Worker groups of this node: commands to the worker runtime, and the workers' files.

Owns the worker runtime, the workers' log folder and their progress files, converts a round's
start command to the workers' commands, variables and files, and posts events of the workers to
the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ParamSpec, TypeVar

from elasticjob.layout import Request
from elasticjob_agent.core.commands import StartGroup, StopGroup
from elasticjob_agent.core.events import (
    Event,
    RuntimeEvent,
    WorkersCounted,
    WorkersProgressed,
)
from elasticjob_agent.core.state import State
from elasticjob_agent.core.worker_environment import (
    Run,
    WorkerFiles,
    shared_environment,
    worker_environment,
)
from elasticjob_agent.ports import NodeSettings
from elasticjob_agent.threads import in_thread
from elasticjob_agent.worker_files import SEEN_SECONDS, ProgressFiles, RunLogs, post_progress
from elasticjob_agent.worker_runtime import (
    Hello,
    LogTrouble,
    PrepareWorkers,
    StartWorkers,
    WorkerExited,
    WorkerRuntime,
    WorkerRuntimeError,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
    WorkerStart,
)

log = logging.getLogger("elasticjob.agent")

ORDER_TIMEOUT_SECONDS = 15.0
DISK_SECONDS = 5.0
"""Disk timeout. The log folder may be on a network disk; after the timeout a round runs without
files."""

T = TypeVar("T")
P = ParamSpec("P")


def prepare_workers(
    hello: Hello, slots: int, modules: tuple[str, ...], memory: str, dumps: bool
) -> PrepareWorkers:
    """Return the command and variables that this node's workers share in all rounds."""
    env = shared_environment(slots, hello.env_names, dumps)
    return PrepareWorkers(hello.argv, env, modules, memory)


def start_workers(
    command: StartGroup,
    hello: Hello,
    logs: RunLogs | None,
    progress: ProgressFiles | None,
    run_id: str,
    max_log_bytes: int,
    dumps: bool,
) -> StartWorkers:
    """Return the order to start this node's workers of a round.

    Args:
        logs: None for workers without log and error files.
        progress: None for workers that cannot report progress.
        dumps: workers can dump the stacks of their threads.
    """
    number = command.roster.number
    run = Run(run_id, command.max_restarts, dumps)
    workers = []
    for local_rank in range(command.assignment.slots):
        folder = None if logs is None else logs.worker(number, local_rank)
        error_file = None if logs is None else logs.error_file(number, local_rank)
        files = WorkerFiles(
            error="" if error_file is None else str(error_file),
            progress="" if progress is None else str(progress.file(number, local_rank)),
            request="" if progress is None else str(progress.request_file(number)),
            saved="" if progress is None else str(progress.saved_file(number, local_rank)),
        )
        env = worker_environment(
            command.roster, command.assignment, local_rank, run, files, hello.env_names
        )
        workers.append(
            WorkerStart(
                local_rank=local_rank,
                argv=hello.argv,
                env=env,
                log_dir="" if folder is None else str(folder),
                prefix=f"[{command.assignment.base_rank + local_rank}] ",
            )
        )
    return StartWorkers(number, tuple(workers), max_log_bytes)


async def _on_disk(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that accesses the disk.

    Not `asyncio.to_thread`: the process waits at its end for the threads of that. Raises the call's
    exception, or TimeoutError after `DISK_SECONDS`.
    """
    return await in_thread(partial(call, *args, **kwargs), DISK_SECONDS)


class WorkerGroups:
    """Worker groups of one agent, one round after the other.

    `post` receives the events; `adjust_start` may change the order to start workers.
    """

    def __init__(
        self,
        settings: NodeSettings,
        runtime: WorkerRuntime,
        post: Callable[[Event], None],
        adjust_start: Callable[[StartWorkers], StartWorkers],
    ) -> None:
        self._settings = settings
        self._workers = settings.slots
        self._runtime = runtime
        self._post = post
        self._adjust_start = adjust_start
        self._logs = RunLogs(settings.logs)
        self._files = ProgressFiles(settings.logs.folder, settings.logs.shared)
        self._requested = asyncio.Event()

    async def aclose(self) -> None:
        """Close the worker runtime; a local one ends its workers."""
        try:
            await self._runtime.aclose()
        finally:
            self._files.close()

    def set_deadline(self, live_until: Callable[[], float | None]) -> None:
        """Set the workers' deadline; it holds even if this process hangs or dies."""
        self._runtime.set_deadline(live_until)

    def renew(self) -> None:
        """Pass on a deadline that may have become later."""
        self._runtime.renew()

    # -- orders ---------------------------------------------------------------------

    async def prepare(self, hello: Hello) -> None:
        """Have the worker runtime preload an interpreter for the workers."""
        settings = self._settings
        assert settings.warm_start is not None
        assert self._workers is not None, "it is known before the first hello"
        order = prepare_workers(
            hello,
            self._workers,
            settings.warm_start.modules,
            self._logs.preload_file(),
            settings.hang_seconds > 0,
        )
        await self._send("prepare", self._runtime.prepare(order))

    async def start(self, command: StartGroup, hello: Hello) -> None:
        """Start the round's workers; without log or progress files if the disk fails."""
        number, assignment = command.roster.number, command.assignment
        logs: RunLogs | None = self._logs
        try:
            await _on_disk(self._logs.prepare, number, assignment.slots, assignment.base_rank)
        except (OSError, TimeoutError) as error:
            logs = None
            trouble = f"round {number} has none: {str(error) or 'the disk does not answer'}"
            self._post(RuntimeEvent(LogTrouble(trouble)))
        files: ProgressFiles | None = self._files
        try:
            await _on_disk(self._files.prepare, number, assignment.slots)
        except (OSError, TimeoutError):
            files = None
            log.warning(
                "%s: no progress reports in round %d: cannot create the files",
                self._settings.name,
                number,
            )
        settings = self._settings
        dumps = settings.hang_seconds > 0
        max_bytes = settings.logs.stream_bytes(assignment.slots)
        order = start_workers(command, hello, logs, files, settings.run_id, max_bytes, dumps)
        await self._send("start", self._runtime.start(self._adjust_start(order)))

    async def stop(self, command: StopGroup, requested: bool) -> None:
        """Stop a round's workers.

        `requested`: a checkpoint was requested. The request is withdrawn, so that workers that
        handle SIGTERM themselves stop waiting for the save.
        """
        order = self._runtime.stop(
            command.round,
            command.grace_seconds,
            command.dump,
            copies=command.copies,
            ends_step=command.ends_step,
        )
        await self._send("stop", order)
        if requested:
            with contextlib.suppress(OSError, TimeoutError):
                await _on_disk(self._files.ask, command.round, None)

    async def ask(self, number: int, request: Request, state: State) -> None:
        """Write the checkpoint request to the workers' file, then post their progress."""
        assert state.group is not None
        try:
            await _on_disk(self._files.ask, number, request)
            await asyncio.sleep(SEEN_SECONDS)
            found = await _on_disk(self._files.read, number, state.group.slots)
        except (OSError, TimeoutError) as error:
            log.warning("%s: cannot ask the workers to save: %s", self._settings.name, error)
            return
        if request.point and state.hello is not None and state.hello.save_signal:
            order = self._runtime.signal(number, state.hello.save_signal)
            await self._send("signal", order)
        self._requested.set()
        utc_ms = time.time_ns() // 1_000_000
        self._post(WorkersProgressed(number, found, utc_ms, answers_request=True))

    async def release(self, exit_code: int, message: str) -> None:
        """Let the worker runtime end with this exit code and message."""
        shown = message if self._settings.announce else ""
        await self._send("release", self._runtime.release(exit_code, shown))

    async def _send(self, what: str, order: Awaitable[None]) -> None:
        """Send a command. The core repeats a lost one after the next `Hello`."""
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_SECONDS):
                await order
        except (WorkerRuntimeError, TimeoutError) as error:
            log.warning("%s: launcher command %s failed: %s", self._settings.name, what, error)

    # -- events ---------------------------------------------------------------------

    async def read_events(self) -> None:
        """Post the number of workers, if the runtime has one, and its events until its end."""
        try:
            await self._count()
            async for event in self._runtime.events():
                self._post(await self._with_evidence(event))
        except WorkerRuntimeError as error:
            self._post(RuntimeEvent(WorkerRuntimeLost(str(error))))
            return
        self._post(RuntimeEvent(WorkerRuntimeLost("it ended")))

    async def _count(self) -> None:
        counted = await self._runtime.node_workers()
        if counted is not None:
            self._workers = counted
            self._post(WorkersCounted(counted))
        elif self._workers is None:
            raise WorkerRuntimeError(
                "the launcher did not count the workers, perhaps because it is older than the agent"
            )

    async def follow(self, state: Callable[[], State]) -> None:
        """Post the progress of running workers."""
        await post_progress(self._files, state, self._post, self._requested)

    async def _with_evidence(self, event: WorkerRuntimeEvent) -> RuntimeEvent:
        """Add the round's error files and progress to an exit or `Hello`.

        The core classifies a failure from all of them together.
        """
        number = None
        match event:
            case WorkerExited():
                number = event.round
            case Hello() if event.running is not None:
                number = event.running
            case Hello() if event.exits:
                number = event.exits[-1].round
        if number is None or self._workers is None:
            return RuntimeEvent(event)
        well = isinstance(event, WorkerExited) and event.exit_code == 0
        try:
            async with asyncio.timeout(DISK_SECONDS):
                progress = await _on_disk(self._files.read, number, self._workers)
                if well:
                    return RuntimeEvent(event, progress=progress)
                reports = await _on_disk(self._logs.reports, number, self._workers)
                base_rank = await _on_disk(self._logs.base_rank, number)
        except OSError:  # or the timeout
            return RuntimeEvent(event)
        return RuntimeEvent(event, reports, base_rank, progress)
