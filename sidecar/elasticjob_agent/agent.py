"""Imperative shell of the agent: one event queue, one loop that steps the core, and the I/O.

Holds no state of the job: `core.step` decides, the worker runtime (`Hands`) and the rendezvous
keep the state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import assert_never

from elasticjob_agent.core.model import (
    AskCrew,
    Command,
    Directed,
    Ending,
    Event,
    Exit,
    ExitCode,
    Facts,
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
)
from elasticjob_agent.core.step import step, wake_at
from elasticjob_agent.crews import Crews
from elasticjob_agent.hands import Hands
from elasticjob_agent.ports import PortHolder
from elasticjob_agent.signals import Signals
from elasticjob_agent.surroundings import Attendant, NodeSettings, Rendezvous
from elasticjob_rendezvous.core.store_trouble import StoreTrouble

log = logging.getLogger("elasticjob.agent")


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running agent, for probes and status queries; `stepped_at` is monotonic."""

    state: State
    stepped_at: float


class Agent:
    """Agent of one node: runs its workers as the rendezvous directs, until the job or node ends.

    Args:
        settings: settings of the node.
        hands: worker runtime.
        enter: makes the rendezvous member, given the port at which the launcher answers
            probes; called once, after the worker runtime's first `Hello`.
        attendant: hooks, see `Attendant`.
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
        self._enter = enter
        self._ports = PortHolder(settings.address)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._crews = Crews(settings, hands, self._events.put_nowait, self._attendant.dressed)
        self._rendezvous: Rendezvous | None = None
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
        """True if the rendezvous holds a lease for this node."""
        return self._rendezvous is not None and self._rendezvous.registered

    @property
    def trouble(self) -> StoreTrouble | None:
        """Problem with the rendezvous store; None while it is usable or its state is unknown."""
        found: StoreTrouble | None = getattr(self._rendezvous, "trouble", None)
        return found

    def leave(self, reason: str, hurry: bool = False) -> None:
        """Ask this node to leave the job. Idempotent; `hurry` skips all grace periods."""
        self._events.put_nowait(LeaveAsked(reason, hurry))

    async def run(self) -> Ending:
        """Run until the end. An internal error is logged and returned as an ending as well."""
        try:
            # Handled until all is closed: a second SIGTERM must not prevent leaving the rendezvous.
            with self.signals.heeded():
                return await self._lived()
        except Exception as error:
            log.exception("%s: the agent failed", self._settings.name)
            return Ending(ExitCode.INTERNAL, ExitCode.INTERNAL, _fault(self._settings, error))

    async def _lived(self) -> Ending:
        async with AsyncExitStack() as stack:
            stack.callback(self._ports.close)
            stack.push_async_callback(self._crews.aclose)
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._crews.hear()),
                    tasks.create_task(self._crews.follow(lambda: self.progress.state)),
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
        """Process events one by one; run all commands of a step before the next step."""
        state = self.progress.state
        while True:
            event = await self._next(wake_at(state))
            now = time.monotonic()
            state, commands = step(state, event, now)
            self.progress = Progress(state, now)
            self._attendant.observed(state, event)
            if self._rendezvous is None and state.hello is not None:
                self._rendezvous = self._enter(state.hello.probe_port)
                self._crews.heed(self._live_until)
                self._rendezvous.on_evidence(self._crews.renew)
                await stack.enter_async_context(self._rendezvous)
                pumps.append(tasks.create_task(self._hear_rendezvous(self._rendezvous)))
            for command in commands:
                if isinstance(command, Exit):
                    return command.ending
                await self._do(command, state)

    def _live_until(self) -> float | None:
        return None if self._rendezvous is None else self._rendezvous.live_until

    async def _next(self, at: float | None) -> Event:
        if at is None:
            return await self._events.get()
        try:
            async with asyncio.timeout(max(0.0, at - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return Timer()

    async def _do(self, command: Command, state: State) -> None:
        match command:
            case StartCrew():
                assert state.hello is not None
                await self._crews.start(command, state.hello)
            case PrepareCrew():
                assert state.hello is not None
                await self._crews.prepare(state.hello)
            case StopCrew(number, grace_seconds, dump):
                asked = state.crew is not None and state.crew.asked is not None
                await self._crews.stop(number, grace_seconds, dump, asked)
            case AskCrew(number, request):
                await self._crews.ask(number, request, state)
            case HoldPort():
                self._events.put_nowait(PortHeld(self._ports.hold()))
            case Tell(local):
                if self._rendezvous is not None:
                    self._rendezvous.tell(local)
            case Release(exit_code, message):
                await self._crews.release(int(exit_code), message)
            case Note(text, warning):
                log.log(
                    logging.WARNING if warning else logging.INFO,
                    "%s: %s", self._settings.name, text,
                )  # fmt: skip
            case Exit():
                raise AssertionError("the loop takes this one")
            case _:
                assert_never(command)

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
