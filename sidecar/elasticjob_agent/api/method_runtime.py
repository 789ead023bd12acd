"""Worker runtime over the methods of a `SimpleElasticAgent` subclass.

The subclass starts, stops and monitors the workers; the agent's core decides when.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from elasticjob_agent.api.spec import RunResult, WorkerGroup, WorkerState
from elasticjob_agent.settings import inherited_names
from elasticjob_agent.threads import in_thread
from elasticjob_agent.worker_runtime import (
    Hello,
    PrepareWorkers,
    Started,
    StartWorkers,
    Stopped,
    WorkerExited,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
)


class WorkerMethods(Protocol):
    """Worker methods of `SimpleElasticAgent` that a subclass implements."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]: ...

    def _stop_workers(self, worker_group: WorkerGroup) -> None: ...

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult: ...


class MethodRuntime:
    """Worker runtime that calls the methods in threads, one at a time."""

    def __init__(self, methods: WorkerMethods, group: WorkerGroup, interval_seconds: float) -> None:
        self._methods = methods
        self._group = group
        self._interval_seconds = interval_seconds
        self._queue: asyncio.Queue[WorkerRuntimeEvent | BaseException] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()
        self._monitor: asyncio.Task[None] | None = None
        self.result: RunResult | None = None
        """Result of `_monitor_workers` when the workers ended."""

    async def node_workers(self) -> int | None:
        return None

    async def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        """Yield events. Raises the exception of a method, which is not a worker's failure."""
        yield Hello((), os.getpid(), sys.executable, str(Path.cwd()), 0, None, {}, (),
                    inherited_names())  # fmt: skip
        while True:
            event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, WorkerRuntimeLost):
                return

    def set_deadline(self, live_until: Callable[[], float | None]) -> None:
        """Do nothing: the methods of a subclass take no deadline."""

    def renew(self) -> None:
        """Do nothing, see `set_deadline`."""

    async def prepare(self, command: PrepareWorkers) -> None:
        """Do nothing: `Hello` does not offer it, so the core never asks."""

    async def start(self, command: StartWorkers) -> None:
        self.result = None
        try:
            async with self._one_at_a_time:
                ids = await in_thread(lambda: self._methods._start_workers(self._group))
        except Exception as error:
            self._queue.put_nowait(error)
            return
        for local_rank, id_ in ids.items():
            self._group.workers[local_rank].id = id_
        pids = {rank: id_ if isinstance(id_, int) else 0 for rank, id_ in ids.items()}
        self._queue.put_nowait(Started(command.round, pids))
        self._monitor = asyncio.create_task(self._monitored(command.round))

    async def stop(
        self,
        round: int,
        grace_seconds: float,
        dump: bool = False,
        *,
        copies: bool = True,
        ends_step: bool = False,
    ) -> None:
        """Stop the workers; the subclass chooses the grace period."""
        self._end_monitor()
        try:
            async with self._one_at_a_time:
                await in_thread(lambda: self._methods._stop_workers(self._group))
        except Exception as error:
            self._queue.put_nowait(error)
            return
        self._queue.put_nowait(Stopped(round))

    async def signal(self, round: int, signum: int) -> None:
        return

    async def release(self, exit_code: int, message: str) -> None:
        self._queue.put_nowait(WorkerRuntimeLost("released"))

    async def aclose(self) -> None:
        self._end_monitor()

    def _end_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
            self._monitor = None

    async def _monitored(self, number: int) -> None:
        try:
            while True:
                await asyncio.sleep(self._interval_seconds)
                async with self._one_at_a_time:
                    result = await in_thread(lambda: self._methods._monitor_workers(self._group))
                if result.state != WorkerState.HEALTHY:
                    break
            self.result = result
            for event in self._ended(number, result):
                self._queue.put_nowait(event)
        except Exception as error:
            self._queue.put_nowait(error)

    def _ended(self, number: int, result: RunResult) -> list[WorkerRuntimeEvent]:
        ranks = range(len(self._group.workers))
        if result.state == WorkerState.SUCCEEDED:
            exits = [WorkerExited(number, rank, 0, 0, None, 0) for rank in ranks]
            return [*exits, Stopped(number)]
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            raise RuntimeError(f"the worker group is {result.state}: running workers are unknown")
        failures = [
            WorkerExited(
                number,
                failure.local_rank,
                failure.pid,
                None if failure.exitcode < 0 else failure.exitcode,
                -failure.exitcode if failure.exitcode < 0 else None,
                failure.timestamp * 1000,
                str(failure.message),
            )
            for failure in result.failures.values()
        ]
        return [*failures] or [WorkerExited(number, 0, 0, 1, None, 0, f"they are {result.state}")]
