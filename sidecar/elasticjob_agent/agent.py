"""Imperative shell of the agent: one event queue, one loop that steps the core, and the I/O.

Holds no state of the job: `core.step` decides, the worker runtime and the rendezvous keep the
state. The agent also reserves the ports for MASTER_PORT.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import assert_never

from elasticjob_agent.core.commands import (
    Command,
    Exit,
    LogLine,
    PrepareGroup,
    Release,
    ReportLocal,
    RequestCheckpoint,
    ReservePort,
    StartGroup,
    StopGroup,
)
from elasticjob_agent.core.events import (
    DirectiveChanged,
    Event,
    LeaveRequested,
    PortReserved,
    Timer,
)
from elasticjob_agent.core.state import (
    Ending,
    ExitCode,
    Facts,
    State,
)
from elasticjob_agent.core.step import step, wake_at
from elasticjob_agent.ports import AgentHooks, NodeSettings, Rendezvous, StateReader
from elasticjob_agent.signals import Signals
from elasticjob_agent.worker_groups import WorkerGroups
from elasticjob_agent.worker_runtime import WorkerRuntime
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble

log = logging.getLogger("elasticjob.agent")

BIND_ATTEMPTS = 20


class PortHolder:
    """Holder of the ports for MASTER_PORT of the current and the next round.

    A bound socket that does not listen reserves each: with SO_REUSEADDR rank 0's store can bind to
    the same port, and until then connections are refused. A port is held from before its round is
    sealed until the next round gets its own. Holding it costs nothing while rank 0 listens there,
    and no other process can take it after rank 0 fails.
    """

    def __init__(self, address: str) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held: list[socket.socket] = []

    def hold(self) -> int:
        """Reserve another port and return it; release all earlier ones except the last."""
        fresh = self._bound()
        for old in self._held[:-1]:
            old.close()
        self._held = [*self._held[-1:], fresh]
        return int(fresh.getsockname()[1])

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held = []

    def _bound(self) -> socket.socket:
        """Return a socket bound on all addresses of this machine, as the store listens on all."""
        for _ in range(BIND_ATTEMPTS):
            held = socket.socket(self._family, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", 0))
            except OSError as error:
                held.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return held
        raise OSError(errno.EADDRINUSE, "no free port for MASTER_PORT on this machine")


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running agent, for probes and status queries; `stepped_at` is monotonic."""

    state: State
    stepped_at: float


class Agent:
    """Agent of one node: runs its workers as the rendezvous directs, until the job or node ends.

    Args:
        settings: settings of the node.
        runtime: worker runtime.
        enter: makes the rendezvous member, given a function that returns the agent's state;
            called once, after the worker runtime's first `Hello`.
        hooks: see `AgentHooks`.
    """

    def __init__(
        self,
        settings: NodeSettings,
        runtime: WorkerRuntime,
        enter: Callable[[StateReader], Rendezvous],
        hooks: AgentHooks | None = None,
    ) -> None:
        self._settings = settings
        self._hooks = hooks or AgentHooks()
        self._enter = enter
        self._ports = PortHolder(settings.address)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._groups = WorkerGroups(
            settings, runtime, self._events.put_nowait, self._hooks.adjust_start
        )
        self._rendezvous: Rendezvous | None = None
        self.signals = Signals(self.leave)
        facts = Facts(
            member=settings.member,
            name=settings.name,
            node=settings.node,
            slots=settings.slots or 0,
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
        self._events.put_nowait(LeaveRequested(reason, hurry))

    async def run(self) -> Ending:
        """Run until the end. An internal error is logged and returned as an ending as well."""
        try:
            # Handled until all is closed: a second SIGTERM must not prevent leaving the rendezvous.
            with self.signals.handling():
                return await self._run_to_exit()
        except Exception as error:
            log.exception("%s: the agent failed", self._settings.name)
            return Ending(ExitCode.INTERNAL, ExitCode.INTERNAL, _fault(self._settings, error))

    async def _run_to_exit(self) -> Ending:
        async with AsyncExitStack() as stack:
            stack.callback(self._ports.close)
            stack.push_async_callback(self._groups.aclose)
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._groups.read_events()),
                    tasks.create_task(self._groups.follow(lambda: self.progress.state)),
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
            self._hooks.observed(state, event)
            if self._rendezvous is None and state.hello is not None:
                self._rendezvous = self._enter(lambda: self.progress.state)
                self._groups.set_deadline(self._live_until)
                self._rendezvous.on_evidence(self._groups.renew)
                await stack.enter_async_context(self._rendezvous)
                pumps.append(tasks.create_task(self._receive_from_rendezvous(self._rendezvous)))
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
            case StartGroup():
                assert state.hello is not None
                await self._groups.start(command, state.hello)
            case PrepareGroup():
                assert state.hello is not None
                await self._groups.prepare(state.hello)
            case StopGroup():
                requested = state.group is not None and state.group.request is not None
                await self._groups.stop(command, requested)
            case RequestCheckpoint(number, request):
                await self._groups.ask(number, request, state)
            case ReservePort():
                self._events.put_nowait(PortReserved(self._ports.hold()))
            case ReportLocal(local):
                if self._rendezvous is not None:
                    self._rendezvous.report(local)
            case Release(exit_code, message):
                await self._groups.release(int(exit_code), message)
            case LogLine(text, warning):
                log.log(
                    logging.WARNING if warning else logging.INFO,
                    "%s: %s", self._settings.name, text,
                )  # fmt: skip
            case Exit():
                raise AssertionError("the loop takes this one")
            case _:
                assert_never(command)

    async def _receive_from_rendezvous(self, rendezvous: Rendezvous) -> None:
        async for directive in rendezvous.directives():
            self._events.put_nowait(DirectiveChanged(directive))


def _fault(settings: NodeSettings, error: Exception) -> str:
    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    return (
        f"job {settings.run_id}: the agent of {settings.name} failed: {text}; "
        "its workers are left to the launcher, if there is one"
    )
