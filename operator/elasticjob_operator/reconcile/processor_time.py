"""Bound on the processor time of one reconcile.

Planning and status are computed in the event loop, which also renews the leader's Lease and
answers probes. A timer of the process ends a computation that takes too long; the time in which
other processes use the machine does not count.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

STEP_SECONDS = 2.0
"""Maximum processor time between two waits: a quarter of the duration of the leader's Lease. A job
of the maximum size needs half of it."""
TOTAL_SECONDS = 30.0
"""Maximum processor time of a reconcile."""
REPEAT_SECONDS = 0.5
"""Interval at which the timer fires again, in case the code that it met dropped the exception."""


class TooLong(Exception):
    """Reconcile that needed too much processor time."""

    def __init__(self, seconds: float, subject: str) -> None:
        super().__init__(f"{subject} needed more than {seconds:g} s of processor time")


class ProcessorTime:
    """Limiter of processor time: `limit` wraps a coroutine of the main thread.

    In another thread, where no signal arrives, only the total is limited.
    """

    def __init__(
        self, step_seconds: float = STEP_SECONDS, total_seconds: float = TOTAL_SECONDS
    ) -> None:
        self._step_seconds = step_seconds
        self._total_seconds = total_seconds
        self._armed = False
        self._installed = False

    def limit(self, work: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
        """Return an awaitable that runs the coroutine and raises `TooLong` in it."""
        return _Limited(work, self._step, self._total_seconds)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Limit the processor time of this block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._installed:
            signal.signal(signal.SIGVTALRM, self._fire)
            self._installed = True
        self._armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._step_seconds, REPEAT_SECONDS)
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _fire(self, _signum: int, _frame: FrameType | None) -> None:
        if self._armed:
            raise TooLong(self._step_seconds, "one step of the reconcile")


class _Limited(Generic[Result]):
    def __init__(
        self,
        work: Coroutine[Any, Any, Result],
        step: Callable[[], Any],
        total_seconds: float,
    ) -> None:
        self._work = work
        self._step = step
        self._total_seconds = total_seconds

    def __await__(self) -> Generator[Any, Any, Result]:
        spent, resume = 0.0, partial(self._work.send, None)
        try:
            while True:
                began = time.thread_time()
                try:
                    with self._step():
                        awaited = resume()
                except StopIteration as end:
                    result: Result = end.value
                    return result
                spent += time.thread_time() - began
                if spent > self._total_seconds:
                    # Once more from zero: the coroutine may have to clean up.
                    error = TooLong(self._total_seconds, "the reconcile")
                    spent, resume = 0.0, partial(self._work.throw, error)
                    continue
                try:
                    resume = partial(self._work.send, (yield awaited))
                except BaseException as error:  # of the awaited future, also a cancellation
                    resume = partial(self._work.throw, error)
        finally:
            with suppress(RuntimeError):
                self._work.close()
