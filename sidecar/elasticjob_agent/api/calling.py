"""Execution of blocking calls from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CALL_SECONDS = 30.0
"""Timeout of a call to a handler or a store."""


async def in_thread(call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a blocking call in a thread and return its result.

    Raises the call's exception, or TimeoutError after `seconds`; the call may then continue. Each
    call has its own daemon thread, so that a blocked one delays neither other calls nor the exit
    of the process.
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

    threading.Thread(target=run, name="elasticjob-call", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await answer
