"""Background thread whose event loop runs the member of a blocking handler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from elasticjob_rendezvous.api import RendezvousConnectionError
from elasticjob_rendezvous.etcd.forking import is_forked, use_grpc
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.protocol.directives import Directive
from elasticjob_rendezvous.protocol.worker_group import Local

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0
"""Maximum wait for etcd in `start`; after it, `next_rendezvous` reports the problem."""
CONNECT_SECONDS = 10.0
T = TypeVar("T")


class Background:
    """Runner of the member from `start` to `stop`; can be started again."""

    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._member: RendezvousMember | None = None

    @property
    def member(self) -> RendezvousMember | None:
        """Most recent member; None before the first start.

        Raises:
            RendezvousUnsupportedError: this process was forked after the start.
        """
        if self._member is not None:
            use_grpc()
        return self._member

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, and wait up to CONNECT_TIMEOUT_SECONDS for a connection.

        Raises:
            RendezvousConnectionError: the member could not start.
            RendezvousUnsupportedError: this process was forked after gRPC was used.
        """
        use_grpc()
        ready = threading.Event()
        failed: list[BaseException] = []

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            async with RendezvousMember(self._settings) as member:
                self._member = member
                ready.set()
                await self._stop.wait()

        def run() -> None:
            try:
                asyncio.run(serve())
            except BaseException as error:
                failed.append(error)
                log.exception("the rendezvous thread died")
            finally:
                ready.set()

        self._thread = threading.Thread(target=run, name="elasticjob-rendezvous", daemon=True)
        self._thread.start()
        ready.wait()
        if failed:
            self._thread = None
            raise RendezvousConnectionError(f"could not start: {failed[0]}") from failed[0]
        self.call(self._await_connected, CONNECT_SECONDS)

    def stop(self, seconds: float) -> bool:
        """End the thread; return True if it ended within `seconds`."""
        thread = self._thread
        self.end()
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def end(self) -> None:
        """Request the end of the thread, without waiting for it."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None or is_forked():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)

    def call(self, work: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Run a coroutine in the loop and return its result, or raise its error or TimeoutError.

        The coroutine is cancelled when the caller stops waiting.
        """
        use_grpc()
        assert self._loop is not None

        async def wrapped() -> T:
            return await work()

        future = asyncio.run_coroutine_threadsafe(wrapped(), self._loop)
        try:
            return future.result(seconds)
        finally:
            future.cancel()  # no effect on a finished one

    def report(self, local: Local) -> None:
        """Pass the state of this node to the member, without waiting; thread-safe."""
        member = self.member
        if self._loop is not None and member is not None:
            self._loop.call_soon_threadsafe(member.report, local)

    async def directive(self, enough: Callable[[Directive], bool], seconds: float) -> Directive:
        """Wait in the loop for the first directive that satisfies `enough`. Raises TimeoutError."""
        assert self.member is not None
        async with asyncio.timeout(seconds):
            async for directive in self.member.directives():
                if enough(directive):
                    return directive
        raise RendezvousConnectionError("the rendezvous ended unexpectedly")

    async def _await_connected(self) -> None:
        assert self.member is not None
        await self.member.wait_connected(CONNECT_TIMEOUT_SECONDS)
