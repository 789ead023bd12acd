"""Bridges between event loops and threads: blocking calls, and a blocking worker runtime.

The blocking worker runtime is driven by an event loop in a thread of its own;
`LocalElasticAgent` uses it when its steps are called one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from elasticjob_agent.worker_runtime import (
    Hello,
    Started,
    StartRefused,
    StartWorkers,
    Stopped,
    WorkerExited,
    WorkerRuntime,
    WorkerRuntimeError,
    WorkerRuntimeLost,
    WorkersStuck,
)

T = TypeVar("T")

CALL_SECONDS = 30.0
"""Timeout of a call to a handler or a store."""


async def in_thread(call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a blocking call in a thread and return its result.

    Raises the call's exception, TimeoutError after `seconds`, while the call may continue, or
    OSError if no further thread can be started. Each call has its own daemon thread, so that a
    blocked one delays neither other calls nor the exit of the process.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no waiter
            loop.call_soon_threadsafe(settle, result, fault)

    try:
        threading.Thread(target=run, name="elasticjob-call", daemon=True).start()
    except RuntimeError as error:  # the workers may have used up the processes of the pod
        raise OSError(errno.EAGAIN, str(error)) from error
    async with asyncio.timeout(seconds):
        return await answer


START_SECONDS = 60.0
END_SECONDS = 15.0


class BlockingRuntime:
    """Blocking worker runtime. The constructor starts it; all methods are thread-safe.

    Raises:
        WorkerRuntimeError: the runtime is lost, or refused a command.
    """

    def __init__(self, make: Callable[[], WorkerRuntime]) -> None:
        self._changed = threading.Condition()
        self._hello: Hello | None = None
        self._lost = ""
        self._round = 0
        self._pids: dict[int, int] | None = None
        self._refused = ""
        self._exits: dict[int, WorkerExited] = {}
        self._empty = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="elasticjob-runtime", daemon=True
        )
        self._thread.start()
        self._runtime = make()
        self._receiving = asyncio.run_coroutine_threadsafe(self._receive(), self._loop)
        self._wait(lambda: self._hello is not None, START_SECONDS)

    @property
    def hello(self) -> Hello:
        assert self._hello is not None, "the constructor waits for it"
        return self._hello

    def start(self, command: StartWorkers) -> dict[int, int]:
        """Start workers and return their pids by local rank."""
        with self._changed:
            self._round, self._pids, self._refused = command.round, None, ""
            self._exits, self._empty = {}, False
        self._call(self._runtime.start(command), START_SECONDS)
        self._wait(lambda: self._pids is not None or self._refused, START_SECONDS)
        if self._pids is None:
            raise WorkerRuntimeError(self._refused)
        return self._pids

    def stop(self, grace_seconds: float) -> None:
        """End the workers, if any run; on return all their processes have ended."""
        if self._empty:
            return
        self._call(self._runtime.stop(self._round, grace_seconds), END_SECONDS)
        self._wait(lambda: self._empty, grace_seconds + END_SECONDS)

    def signal(self, signum: int) -> None:
        if not self._empty:
            self._call(self._runtime.signal(self._round, signum), END_SECONDS)

    @property
    def exits(self) -> dict[int, WorkerExited]:
        """Exits of the workers that ended, by local rank."""
        with self._changed:
            if self._lost:
                raise WorkerRuntimeError(self._lost)
            return dict(self._exits)

    def close(self) -> None:
        """Kill the remaining workers and stop the thread."""
        if not self._thread.is_alive():
            return
        self._call(self._runtime.aclose(), 2 * END_SECONDS)
        self._call(_result_of(self._receiving), END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)
        self._loop.close()

    async def _receive(self) -> None:
        try:
            async for event in self._runtime.events():
                with self._changed:
                    self._take(event)
                    self._changed.notify_all()
        except WorkerRuntimeError as error:
            self._lose(str(error))
        self._lose("the worker runtime ended")

    def _take(self, event: object) -> None:
        match event:
            case Hello():
                self._hello = event
            case Started(number, pids) if number == self._round:
                self._pids = dict(pids)
            case StartRefused(number, message) if number == self._round:
                self._refused, self._empty = message, True
            case WorkerExited() if event.round == self._round:
                self._exits[event.local_rank] = event
            case Stopped(number) if number == self._round:
                self._empty = True
            case WorkerRuntimeLost(reason) | WorkersStuck(_, reason):
                self._lost, self._empty = reason, True

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost, self._empty = self._lost or reason, True
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], object], seconds: float) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._lost, seconds)
            if self._lost:
                raise WorkerRuntimeError(self._lost)
            if not came:
                raise WorkerRuntimeError(f"the worker runtime did not answer within {seconds:g} s")

    def _call(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


async def _result_of(future: Any) -> None:
    await asyncio.wait([asyncio.wrap_future(future)], timeout=END_SECONDS)
