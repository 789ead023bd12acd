"""This node's workers, for its agent: orders to the hands, and the files beside them.

Owns the hands, the folder of the workers' logs and the files through which they speak. What it
hears of them it posts as events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from elasticjob.layout import Request
from elasticjob_agent.core.model import (
    Event,
    FromHands,
    StartCrew,
    State,
    WorkersProgressed,
)
from elasticjob_agent.environment import prepare_workers, start_workers
from elasticjob_agent.hands import (
    Hands,
    HandsError,
    HandsEvent,
    HandsGone,
    Hello,
    LogTrouble,
    StartWorkers,
    WorkerExited,
)
from elasticjob_agent.logs import RunLogs
from elasticjob_agent.progress import SEEN_SECONDS, ProgressFiles, follow
from elasticjob_agent.surroundings import NodeSettings

log = logging.getLogger("elasticjob.agent")

ORDER_TIMEOUT_SECONDS = 15.0
DISK_SECONDS = 5.0
"""What the log folder's disk may take, which may be a network's: then it goes without files."""


class Crews:
    """`post` takes the events; `dressed` has the last word on how workers are started."""

    def __init__(
        self,
        settings: NodeSettings,
        hands: Hands,
        post: Callable[[Event], None],
        dressed: Callable[[StartWorkers], StartWorkers],
    ) -> None:
        self._settings = settings
        self._hands = hands
        self._post = post
        self._dressed = dressed
        self._logs = RunLogs(settings.logs)
        self._files = ProgressFiles(settings.logs.folder, settings.logs.shared)
        self._asked = asyncio.Event()

    async def aclose(self) -> None:
        """End the hands, and what still runs in them where they are our own."""
        try:
            await self._hands.aclose()
        finally:
            self._files.close()

    def heed(self, live_until: Callable[[], float | None]) -> None:
        """Let workers live no longer than that, whatever becomes of this process."""
        self._hands.heed(live_until)

    def renew(self) -> None:
        """That may have grown."""
        self._hands.renew()

    # -- orders ---------------------------------------------------------------------

    async def prepare(self, hello: Hello) -> None:
        """Have the hands ready for workers."""
        settings = self._settings
        assert settings.warm_start is not None
        order = prepare_workers(
            hello,
            settings.slots,
            settings.warm_start.modules,
            self._logs.memory_file(),
            settings.hang_seconds > 0,
        )
        await self._give("prepare", self._hands.prepare(order))

    async def start(self, command: StartCrew, hello: Hello) -> None:
        """Start the round's workers; where a disk does not take their files, without those."""
        number, seat = command.roster.number, command.seat
        logs: RunLogs | None = self._logs
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.to_thread(self._logs.prepare, number, seat.slots, seat.base_rank)
        except (OSError, TimeoutError) as error:
            logs = None
            trouble = f"round {number} keeps none: {str(error) or 'the disk does not answer'}"
            self._post(FromHands(LogTrouble(trouble)))
        files: ProgressFiles | None = self._files
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.to_thread(self._files.prepare, number, seat.slots)
        except (OSError, TimeoutError):
            files = None
            log.warning("%s: round %d cannot tell its progress", self._settings.name, number)
        settings = self._settings
        dumps = settings.hang_seconds > 0
        order = start_workers(
            command, hello, logs, files, settings.run_id, settings.logs.max_bytes, dumps
        )
        await self._give("start", self._hands.start(self._dressed(order)))

    async def stop(self, number: int, grace_seconds: float, dump: bool, asked: bool) -> None:
        """`asked`: they wait for it, and need not wait on where they handle SIGTERM themselves."""
        await self._give("stop", self._hands.stop(number, grace_seconds, dump))
        if asked:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(DISK_SECONDS):
                    await asyncio.to_thread(self._files.ask, number, None)

    async def ask(self, number: int, request: Request, state: State) -> None:
        """Put the request where the workers look, then read where they are."""
        assert state.crew is not None
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.to_thread(self._files.ask, number, request)
                await asyncio.sleep(SEEN_SECONDS)
                found = await asyncio.to_thread(self._files.read, number, state.crew.slots)
        except (OSError, TimeoutError) as error:
            log.warning("%s: workers cannot be asked to save: %s", self._settings.name, error)
            return
        if request.point and state.hello is not None and state.hello.save_signal:
            order = self._hands.signal(number, state.hello.save_signal)
            await self._give("signal", order)
        self._asked.set()
        utc_ms = time.time_ns() // 1_000_000
        self._post(WorkersProgressed(number, found, utc_ms, asked=True))

    async def release(self, exit_code: int, message: str) -> None:
        """Let the hands end with that."""
        said = message if self._settings.announce else ""
        await self._give("release", self._hands.release(exit_code, said))

    async def _give(self, what: str, order: Awaitable[None]) -> None:
        """One that is lost is given again when the hands say hello anew."""
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_SECONDS):
                await order
        except (HandsError, TimeoutError) as error:
            log.warning("%s: the launcher did not take %s: %s", self._settings.name, what, error)

    # -- events ---------------------------------------------------------------------

    async def hear(self) -> None:
        """Post what the hands say, until they are gone."""
        try:
            async for event in self._hands.events():
                self._post(await self._with_evidence(event))
        except HandsError as error:
            self._post(FromHands(HandsGone(str(error))))
            return
        self._post(FromHands(HandsGone("it ended")))

    async def follow(self, state: Callable[[], State]) -> None:
        """Post what running workers say of their progress."""
        await follow(self._files, state, self._post, self._asked)

    async def _with_evidence(self, event: HandsEvent) -> FromHands:
        """Read error files and progress with the news of an exit: the core judges all together."""
        number = None
        match event:
            case WorkerExited():
                number = event.round
            case Hello() if event.running is not None:
                number = event.running
            case Hello() if event.exits:
                number = event.exits[-1].round
        if number is None:
            return FromHands(event)
        well = isinstance(event, WorkerExited) and event.exit_code == 0
        try:
            async with asyncio.timeout(DISK_SECONDS):
                words = await asyncio.to_thread(self._files.read, number, self._settings.slots)
                if well:
                    return FromHands(event, progress=words)
                reports = await asyncio.to_thread(self._logs.reports, number, self._settings.slots)
                base_rank = await asyncio.to_thread(self._logs.base_rank, number)
        except TimeoutError:
            return FromHands(event)
        return FromHands(event, reports, base_rank, words)
