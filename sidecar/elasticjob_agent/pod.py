"""Worker runtime of a pod: client of the launcher in the training container, over a unix socket."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator

from elasticjob_agent.channel import Attach, Channel, LiveUntil, streams
from elasticjob_agent.hands import HandsError, HandsEvent, HandsGone, PrepareWorkers, StartWorkers

__all__ = ["Attach", "LauncherHands"]

FIRST_RETRY_SECONDS = 0.02
LAST_RETRY_SECONDS = 0.5
# Time limit for reconnecting. A living launcher accepts at once; this allows for a slow one.
RECONNECT_SECONDS = 3.0


class LauncherHands:
    """Worker runtime over the launcher of a pod.

    `events` waits for the first connection without a limit. If the socket closes while the launcher
    lives, the runtime reconnects and another `Hello` follows. A launcher that refuses connections
    is dead: `HandsGone` follows at once, and the loss is final.
    """

    def __init__(self, socket_path: str, attach: Attach) -> None:
        self._socket_path = socket_path
        self._attach = attach
        self._channel: Channel | None = None
        self._released = False
        self._live_until: LiveUntil = lambda: None

    async def events(self) -> AsyncIterator[HandsEvent]:
        channel: Channel | None = await self._first_connection()
        while channel is not None:
            async for event in channel.events():
                yield event
                if isinstance(event, HandsGone):
                    return
            if self._released:
                return
            channel = await self._next_connection()
        yield HandsGone(f"the launcher at {self._socket_path} is gone")

    def heed(self, live_until: LiveUntil) -> None:
        self._live_until = live_until

    def renew(self) -> None:
        if self._channel is not None:
            self._channel.renew()

    async def prepare(self, command: PrepareWorkers) -> None:
        await self._connected().prepare(command)

    async def start(self, command: StartWorkers) -> None:
        await self._connected().start(command)

    async def stop(self, round: int, grace_seconds: float, dump: bool = False) -> None:
        await self._connected().stop(round, grace_seconds, dump)

    async def signal(self, round: int, signum: int) -> None:
        await self._connected().signal(round, signum)

    async def release(self, exit_code: int, message: str) -> None:
        self._released = True
        await self._connected().release(exit_code, message)

    async def aclose(self) -> None:
        """Disconnect from the launcher: its workers keep running, for the next agent."""
        self._released = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.aclose()

    def _connected(self) -> Channel:
        if self._channel is None:
            raise HandsError(f"not connected to the launcher at {self._socket_path}")
        return self._channel

    async def _first_connection(self) -> Channel:
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._attached()
            except (OSError, TimeoutError, HandsError):
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
                    except (OSError, HandsError) as error:
                        if isinstance(error, OSError) and error.errno == errno.EACCES:
                            return None
                        await asyncio.sleep(FIRST_RETRY_SECONDS)
        except TimeoutError:
            return None

    async def _attached(self) -> Channel:
        reader, writer = await streams(self._socket_path)
        try:
            channel = await Channel.attached(
                reader, writer, self._attach, lambda: self._live_until()
            )
        except HandsError:
            writer.close()
            raise
        self._channel = channel
        return channel
