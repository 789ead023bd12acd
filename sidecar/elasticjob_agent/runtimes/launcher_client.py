"""Client of a pod's launcher: the worker runtime over its unix socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from elasticjob_agent.runtimes.launcher_channel import Attach, Channel, ChannelRuntime
from elasticjob_agent.worker_runtime import (
    Hello,
    NodeCommand,
    WorkerRuntimeError,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
)
from elasticjob_launcher.wire import MAX_MESSAGE_BYTES

log = logging.getLogger("elasticjob.agent")

CONNECT_TIMEOUT_SECONDS = 10.0
FIRST_REMINDER_SECONDS = 15.0
LAST_REMINDER_SECONDS = 600.0
FIRST_RETRY_SECONDS = 0.02
LAST_RETRY_SECONDS = 0.5
RECONNECT_SECONDS = 3.0
"""Maximum duration of a reconnection. A live launcher accepts at once, unless it is slow."""

CommandFactory = Callable[[], Awaitable[NodeCommand]]
"""Returns the order to run the command once for the node."""


class EventStream:
    """Events of a worker runtime; reading its first `Hello` consumes none of them."""

    def __init__(self, events: AsyncIterator[WorkerRuntimeEvent]) -> None:
        self._events = events
        self._read: list[WorkerRuntimeEvent] = []

    async def hello(self) -> Hello:
        """Return the first `Hello`.

        Raises:
            WorkerRuntimeError: the runtime was lost before.
        """
        reason = "it ended before its first message"
        async for event in self._events:
            self._read.append(event)
            if isinstance(event, Hello):
                return event
            if isinstance(event, WorkerRuntimeLost):
                reason = event.reason
                break
        raise WorkerRuntimeError(reason)

    async def all(self) -> AsyncIterator[WorkerRuntimeEvent]:
        """Yield all events, those read before first."""
        for event in self._read:
            yield event
        async for event in self._events:
            yield event


class LauncherClient(ChannelRuntime):
    """Worker runtime over the launcher of a pod.

    `events` waits for the first connection without a limit. If the socket closes while the launcher
    lives, the runtime reconnects and another `Hello` follows. A launcher that refuses connections
    is dead: `WorkerRuntimeLost` follows at once, and the loss is final. After `aclose` its workers
    keep running, for the next agent.

    With `command`, the launcher runs the command once, and torchrun in it starts the workers: if
    `per_node` asks for it, or if the launcher found a reason for it in the program's files.
    """

    def __init__(
        self,
        socket_path: str,
        attach: Attach,
        command: CommandFactory | None = None,
        per_node: bool = False,
    ) -> None:
        super().__init__(f"not connected to the launcher at {socket_path}")
        self._socket_path = socket_path
        self._identity = attach
        self._command = command
        self._per_node = per_node
        self._opened = self._connections()
        self._events = EventStream(self._opened)

    async def node_workers(self) -> int | None:
        if not self._per_node or self._command is None:
            hello = await self._events.hello()
            if not hello.node_launch or self._command is None:
                return hello.slots
            log.info("the launcher runs the command once for this node: %s", hello.node_launch)
            await self._reopen()
        return await self._run(await self._command())

    async def _reopen(self) -> None:
        """Close the first connection, whose events are then read from a new one."""
        await self._opened.aclose()
        if self._channel is not None:
            self._channel.close()
        self._opened = self._connections()
        self._events = EventStream(self._opened)

    async def _run(self, command: NodeCommand) -> int:
        """Run the command; return its number of workers once torchrun in it asks for a round."""
        channel: Channel | None = await self._first_connection()
        while channel is not None:
            reminder = asyncio.create_task(_remind())
            try:
                await channel.run(command)
                found = await channel.joined()
            finally:
                reminder.cancel()
                channel.close()
            if found is not None:
                return found or 1  # 0: the command ended without joining
            channel = await self._next_connection()
        raise WorkerRuntimeError(f"the launcher at {self._socket_path} is gone")

    def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        return self._events.all()

    async def _connections(self) -> AsyncGenerator[WorkerRuntimeEvent, None]:
        channel: Channel | None = await self._first_connection()
        while channel is not None:
            async for event in channel.events():
                yield event
                if isinstance(event, WorkerRuntimeLost):
                    return
            if self._released:
                return
            channel = await self._next_connection()
        yield WorkerRuntimeLost(f"the launcher at {self._socket_path} is gone")

    async def _first_connection(self) -> Channel:
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._attached()
            except (OSError, TimeoutError, WorkerRuntimeError):
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LAST_RETRY_SECONDS)

    async def _next_connection(self) -> Channel | None:
        self._channel = None
        try:
            async with asyncio.timeout(RECONNECT_SECONDS):
                while True:
                    try:
                        return await self._attached()
                    except (ConnectionRefusedError, FileNotFoundError):
                        return None
                    except (OSError, WorkerRuntimeError) as error:
                        if isinstance(error, OSError) and error.errno == errno.EACCES:
                            return None
                        await asyncio.sleep(FIRST_RETRY_SECONDS)
        except TimeoutError:
            return None

    async def _attached(self) -> Channel:
        reader, writer = await open_streams(self._socket_path)
        try:
            channel = await self._attach(reader, writer, self._identity)
        except WorkerRuntimeError:
            writer.close()
            raise
        self._channel = channel
        return channel


async def _remind() -> None:
    """Log at growing intervals that no torchrun in the command has asked for a round."""
    began, seconds = time.monotonic(), FIRST_REMINDER_SECONDS
    while True:
        await asyncio.sleep(seconds)
        log.info(
            "the command has run for %d s without joining the rendezvous: "
            "this node takes part once torchrun in it asks for a round",
            time.monotonic() - began,
        )
        seconds = min(2 * seconds, LAST_REMINDER_SECONDS)


async def open_streams(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the unix socket. Raises OSError or TimeoutError."""
    async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
        return await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
