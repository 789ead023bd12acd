"""The agent's shell: one queue of events, one loop that steps, edges that act.

Owns nothing of the job: `core.step` decides, the hands and the rendezvous know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, assert_never

from elasticjob.layout import Request
from elasticjob_agent.core.model import (
    AskCrew,
    Command,
    Directed,
    Ending,
    Event,
    Exit,
    ExitCode,
    Facts,
    FromHands,
    HoldPort,
    LeaveAsked,
    Note,
    PortHeld,
    PrepareCrew,
    Release,
    StartCrew,
    State,
    StopCrew,
    Tell,
    Timer,
    WorkersProgressed,
)
from elasticjob_agent.core.step import step, wake_at
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
from elasticjob_agent.ports import PortHolder
from elasticjob_agent.progress import SEEN_SECONDS, ProgressFiles, follow
from elasticjob_agent.settings import LogSettings, WarmStart
from elasticjob_agent.signals import Signals
from elasticjob_rendezvous.core.events import Directive, Local

log = logging.getLogger("elasticjob.agent")

ORDER_TIMEOUT_SECONDS = 15.0
DISK_SECONDS = 5.0
"""What the log folder's disk may take, which may be a network's: then it goes without files."""


class NodeSettings(Protocol):
    """What an agent must be told of its node. `settings.AgentSettings` is that and more."""

    @property
    def run_id(self) -> str: ...
    @property
    def member(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def logs(self) -> LogSettings: ...
    @property
    def stop_grace_seconds(self) -> float: ...
    @property
    def hang_seconds(self) -> float: ...
    @property
    def announce(self) -> bool: ...
    @property
    def warm_start(self) -> WarmStart | None: ...


class Rendezvous(Protocol):
    """What the agent needs of the rendezvous.

    `etcd.member.RendezvousMember` is it, and `api.following.HandlerRendezvous`.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def tell(self, local: Local) -> None:
        """The whole truth of this node; does not block."""
        ...

    def directives(self) -> AsyncIterator[Directive]:
        """The current directive, then each change."""
        ...

    @property
    def registered(self) -> bool:
        """Whether our key stands in etcd, as far as we know."""
        ...


class Attendant:
    """Looks on, and may change how workers are started. This one does neither."""

    def dressed(self, order: StartWorkers) -> StartWorkers:
        """The order as it is to be given to the hands."""
        return order

    def observed(self, state: State, event: Event) -> None:
        """The state after each step, and what it took in."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a probe or a person may ask a running agent."""

    state: State
    stepped_at: float


class Agent:
    """Runs one node's workers as the rendezvous directs, until the job ends or the node leaves.

    Args:
        settings: what this agent was told.
        hands: where the workers run.
        enter: makes the rendezvous' member, given the port at which the launcher
            answers probes; called once, when the hands have said hello.
        attendant: see `Attendant`.
    """

    def __init__(
        self,
        settings: NodeSettings,
        hands: Hands,
        enter: Callable[[int], Rendezvous],
        attendant: Attendant | None = None,
    ) -> None:
        self._settings = settings
        self._attendant = attendant or Attendant()
        self._hands = hands
        self._enter = enter
        self._logs = RunLogs(settings.logs)
        self._files = ProgressFiles(settings.logs.folder, settings.logs.shared)
        self._ports = PortHolder(settings.address)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._rendezvous: Rendezvous | None = None
        self._asked = asyncio.Event()
        self.signals = Signals(self.leave)
        facts = Facts(
            member=settings.member,
            name=settings.name,
            node=settings.node,
            slots=settings.slots,
            stop_grace_seconds=settings.stop_grace_seconds,
            run_id=settings.run_id,
            warm_start=settings.warm_start is not None,
            hang_seconds=settings.hang_seconds,
        )
        self.progress = Progress(State(facts), time.monotonic())

    @property
    def settings(self) -> NodeSettings:
        return self._settings

    @property
    def registered(self) -> bool:
        """Whether the rendezvous holds a lease for this node."""
        return self._rendezvous is not None and self._rendezvous.registered

    def leave(self, reason: str, hurry: bool = False) -> None:
        """Ask this node to leave the job. Safe to call again; `hurry` forgoes all grace."""
        self._events.put_nowait(LeaveAsked(reason, hurry))

    async def run(self) -> Ending:
        """Until the end. A fault of the agent itself is an ending too: it is logged and told."""
        try:
            # Until all is closed: a second SIGTERM must not keep the rendezvous from being left.
            with self.signals.heeded():
                return await self._lived()
        except Exception as error:
            log.exception("%s: the agent failed", self._settings.name)
            return Ending(ExitCode.INTERNAL, ExitCode.INTERNAL, _fault(self._settings, error))

    async def _lived(self) -> Ending:
        async with AsyncExitStack() as stack:
            stack.callback(self._ports.close)
            stack.callback(self._files.close)
            stack.push_async_callback(self._hands.aclose)
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._hear_hands()),
                    tasks.create_task(
                        follow(
                            self._files,
                            lambda: self.progress.state,
                            self._events.put_nowait,
                            self._asked,
                        )
                    ),
                ]
                try:
                    return await self._steps(stack, tasks, pumps)
                finally:
                    for pump in pumps:
                        pump.cancel()

    async def _steps(
        self,
        stack: AsyncExitStack,
        tasks: asyncio.TaskGroup,
        pumps: list[asyncio.Task[None]],
    ) -> Ending:
        """Take event after event; each step's commands are done before the next."""
        state = self.progress.state
        while True:
            event = await self._next(wake_at(state))
            now = time.monotonic()
            state, commands = step(state, event, now)
            self.progress = Progress(state, now)
            self._attendant.observed(state, event)
            if self._rendezvous is None and state.hello is not None:
                self._rendezvous = self._enter(state.hello.probe_port)
                await stack.enter_async_context(self._rendezvous)
                pumps.append(tasks.create_task(self._hear_rendezvous(self._rendezvous)))
            for command in commands:
                if isinstance(command, Exit):
                    return command.ending
                await self._do(command, state)

    async def _next(self, at: float | None) -> Event:
        if at is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0.0, at - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return Timer()

    # -- commands -------------------------------------------------------------------

    async def _do(self, command: Command, state: State) -> None:
        match command:
            case StartCrew():
                await self._start(command, state)
            case PrepareCrew():
                await self._prepare(state)
            case StopCrew(number, grace_seconds, dump):
                await self._tell_hands("stop", self._hands.stop(number, grace_seconds, dump))
                await self._let_go(number, state)
            case AskCrew(number, request):
                await self._ask(number, request, state)
            case HoldPort():
                self._events.put_nowait(PortHeld(self._ports.hold()))
            case Tell(local):
                if self._rendezvous is not None:
                    self._rendezvous.tell(local)
            case Release(exit_code, message):
                said = message if self._settings.announce else ""
                await self._tell_hands("release", self._hands.release(int(exit_code), said))
            case Note(text, warning):
                log.log(
                    logging.WARNING if warning else logging.INFO,
                    "%s: %s", self._settings.name, text,
                )  # fmt: skip
            case Exit():
                raise AssertionError("the loop takes this one")
            case _:
                assert_never(command)

    async def _ask(self, number: int, request: Request, state: State) -> None:
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
            await self._tell_hands("signal", order)
        self._asked.set()
        utc_ms = time.time_ns() // 1_000_000
        self._events.put_nowait(WorkersProgressed(number, found, utc_ms, asked=True))

    async def _let_go(self, number: int, state: State) -> None:
        """Workers that wait for their stop, and handle SIGTERM themselves, need not wait on."""
        if state.crew is not None and state.crew.asked is not None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(DISK_SECONDS):
                    await asyncio.to_thread(self._files.ask, number, None)

    async def _prepare(self, state: State) -> None:
        settings = self._settings
        assert state.hello is not None
        assert settings.warm_start is not None
        order = prepare_workers(
            state.hello,
            settings.slots,
            settings.warm_start.modules,
            self._logs.memory_file(),
            settings.hang_seconds > 0,
        )
        await self._tell_hands("prepare", self._hands.prepare(order))

    async def _start(self, command: StartCrew, state: State) -> None:
        number, seat = command.roster.number, command.seat
        logs: RunLogs | None = self._logs
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.to_thread(self._logs.prepare, number, seat.slots, seat.base_rank)
        except (OSError, TimeoutError) as error:
            logs = None
            trouble = f"round {number} keeps none: {str(error) or 'the disk does not answer'}"
            self._events.put_nowait(FromHands(LogTrouble(trouble)))
        files: ProgressFiles | None = self._files
        try:
            async with asyncio.timeout(DISK_SECONDS):
                await asyncio.to_thread(self._files.prepare, number, seat.slots)
        except (OSError, TimeoutError):
            files = None
            log.warning("%s: round %d cannot tell its progress", self._settings.name, number)
        assert state.hello is not None
        settings = self._settings
        dumps = settings.hang_seconds > 0
        order = start_workers(
            command, state.hello, logs, files, settings.run_id, settings.logs.max_bytes, dumps
        )
        await self._tell_hands("start", self._hands.start(self._attendant.dressed(order)))

    async def _tell_hands(self, what: str, order: Awaitable[None]) -> None:
        """Give an order. One that is lost is given again when the hands say hello anew."""
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_SECONDS):
                await order
        except (HandsError, TimeoutError) as error:
            log.warning("%s: the launcher did not take %s: %s", self._settings.name, what, error)

    # -- events ---------------------------------------------------------------------

    async def _hear_hands(self) -> None:
        try:
            async for event in self._hands.events():
                self._events.put_nowait(await self._with_evidence(event))
        except HandsError as error:
            self._events.put_nowait(FromHands(HandsGone(str(error))))
            return
        self._events.put_nowait(FromHands(HandsGone("it ended")))

    async def _with_evidence(self, event: HandsEvent) -> FromHands:
        """Read error files and progress with the news of an exit: the core judges all together."""
        number = None
        match event:
            case WorkerExited() if event.exit_code != 0:
                number = event.round
            case Hello() if event.running is not None:
                number = event.running
            case Hello() if event.exits:
                number = event.exits[-1].round
        if number is None:
            return FromHands(event)
        try:
            async with asyncio.timeout(DISK_SECONDS):
                reports = await asyncio.to_thread(self._logs.reports, number, self._settings.slots)
                base_rank = await asyncio.to_thread(self._logs.base_rank, number)
                words = await asyncio.to_thread(self._files.read, number, self._settings.slots)
        except TimeoutError:
            return FromHands(event)
        return FromHands(event, reports, base_rank, words)

    async def _hear_rendezvous(self, rendezvous: Rendezvous) -> None:
        async for directive in rendezvous.directives():
            self._events.put_nowait(Directed(directive))


def _fault(settings: NodeSettings, error: Exception) -> str:
    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    return (
        f"job {settings.run_id}: the agent of {settings.name} failed: {text}; "
        "its workers are left to the launcher, if there is one"
    )
