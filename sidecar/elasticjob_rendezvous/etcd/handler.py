"""The v3 rendezvous behind torch's `RendezvousHandler`: blocking calls over a background loop.

For agents that run their workers themselves. The handler takes it that workers run from
the return of `next_rendezvous` to its next call, which is how torch's agents use it. Who
comes back without having been told that others wait (`num_nodes_waiting`) has lost a
worker of its own: that is reported, in the mildest class there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.core.events import (
    Directive,
    Finish,
    Idle,
    Left,
    Local,
    Refused,
    Run,
    Stop,
    Workers,
)
from elasticjob_rendezvous.core.records import (
    Failure,
    FailureClass,
    MemberState,
    Outcome,
    OutcomeKind,
    Roster,
    RoundState,
)
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND, member_settings, timeout_seconds

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0
START_SECONDS = 1.0
CONNECT_PATIENCE_SECONDS = 2.0
"""How long making a handler waits for etcd; after that `next_rendezvous` says what is wrong."""
T = TypeVar("T")


class EtcdV3RendezvousHandler(RendezvousHandler):
    """See `api.RendezvousHandler`. Made by `create_handler`; connects when it is made."""

    def __init__(self, settings: MemberSettings, run_id: str, timeout_seconds: float) -> None:
        self._settings = settings
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._local = Local()
        self._member: RendezvousMember | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._port: socket.socket | None = None
        self._left = False
        self.roster: Roster | None = None
        """The membership of the round that `next_rendezvous` returned last."""
        self._start()

    @property
    def settings(self) -> MemberSettings:
        """What its member is told."""
        return self._settings

    # -- the API --------------------------------------------------------------------

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._start()
        self._local = replace(
            self._local,
            ready=True,
            workers=Workers.NONE,
            failure=self._failure(),
            done=False,
            master_port=self._hold_port(),
        )
        directive = self._call(self._await_run, self._timeout_seconds + SHUTDOWN_SECONDS)
        if not isinstance(directive, Run):
            raise self._refusal(directive)
        roster = directive.roster
        seat = roster.seat(directive.member)
        assert seat is not None, "a Run directive seats its member"
        self.roster = roster
        self._release_port()
        info = RendezvousStoreInfo(roster.master_address, roster.master_port)
        return RendezvousInfo(None, seat.group_rank, len(roster.seats), info, roster.number)

    @property
    def is_registered(self) -> bool:
        """Whether our key stands in etcd, as far as is known here."""
        member = self._member
        identity = self._settings.config.identity
        return member is not None and member.view.member(identity.id) is not None

    def is_closed(self) -> bool:
        member = self._member
        if member is None or member.view.round is None:
            return False
        return member.view.round.record.state is RoundState.CLOSED

    def set_closed(self) -> None:
        self._start()
        outcome = Outcome(OutcomeKind.STOPPED, "closed by an agent")
        self._call(lambda: self._await_closed(outcome), SHUTDOWN_SECONDS)

    def num_nodes_waiting(self) -> int:
        """More than 0 as soon as this node's workers must not go on, whatever the reason."""
        member = self._member
        if member is None or self._local.workers is Workers.NONE:
            return 0
        if self._thread is None or not self._thread.is_alive():
            raise RendezvousConnectionError("the rendezvous thread of this node has died")
        if isinstance(member.directive, Run | Idle):
            return 0
        if self._local.workers is not Workers.STOPPING:
            self._tell(replace(self._local, workers=Workers.STOPPING))
        waiting = [
            versioned
            for versioned in tuple(member.view.members().values())  # the loop goes on meanwhile
            if versioned.record.state is MemberState.WAITING
        ]
        return max(1, len(waiting))

    @property
    def grace_seconds(self) -> float:
        """How long workers that must not go on may take to end: none after a loss."""
        member = self._member
        directive = None if member is None else member.directive
        return directive.grace_seconds if isinstance(directive, Stop | Finish) else 0.0

    def report_done(self) -> None:
        """Say that every worker of the last round ended with success here."""
        self._tell(replace(self._local, workers=Workers.NONE, done=True))

    def wait_end(self, seconds: float) -> Outcome | None:
        """After `report_done`: how the run ended, or None when a newer round began without us.

        Raises:
            TimeoutError: neither happened in time.
        """
        return self._call(lambda: self._await_end(seconds), seconds + SHUTDOWN_SECONDS)

    def shutdown(self) -> bool:
        if self._thread is None or self._loop is None or self._stop is None:
            return True
        if not self._left:
            self._tell(replace(self._local, workers=Workers.NONE, leaving="shutdown"))
            with contextlib.suppress(TimeoutError):
                self._call(self._await_left, SHUTDOWN_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SHUTDOWN_SECONDS)
        self._release_port()
        alive = self._thread.is_alive()
        self._thread = None
        return not alive

    # -- waiting, in the loop -------------------------------------------------------

    async def _await(self, enough: Callable[[Directive], bool], seconds: float) -> Directive:
        assert self._member is not None
        async with asyncio.timeout(seconds):
            async for directive in self._member.directives():
                if enough(directive):
                    return directive
        raise RendezvousConnectionError("the rendezvous ended unexpectedly")

    async def _await_connected(self) -> None:
        assert self._member is not None
        await self._member.wait_connected(CONNECT_PATIENCE_SECONDS)

    async def _await_run(self) -> Directive:
        """Say that we are ready, and wait for a round newer than the last.

        All in one visit to the loop: each costs the caller's thread a fight for the GIL.
        """
        assert self._member is not None
        wanted = self._local.round
        self._member.tell(self._local)

        def enough(directive: Directive) -> bool:
            if isinstance(directive, Run):
                return directive.roster.number > wanted
            return isinstance(directive, Left | Finish | Refused)

        try:
            directive = await self._await(enough, self._timeout_seconds)
        except TimeoutError as error:
            raise RendezvousTimeoutError(
                f"no round of {self._run_id!r} within {self._timeout_seconds:g} s"
            ) from error
        if isinstance(directive, Run):
            self._started(directive.roster.number)
        return directive

    def _started(self, number: int) -> None:
        """The caller starts its workers now; nobody tells us when they run.

        Until then they count as promised: the directive was handed over.
        """

        def running() -> None:
            local = self._local
            if local.round == number and local.workers is Workers.STARTING and self._member:
                self._local = replace(local, workers=Workers.RUNNING)
                self._member.tell(self._local)

        self._local = replace(self._local, workers=Workers.STARTING, round=number, failure=None)
        asyncio.get_running_loop().call_later(START_SECONDS, running)

    async def _await_closed(self, outcome: Outcome) -> None:
        assert self._member is not None
        self._member.close(outcome)
        await self._await(lambda directive: isinstance(directive, Finish), SHUTDOWN_SECONDS)

    async def _await_end(self, seconds: float) -> Outcome | None:
        member, number = self._member, self._local.round
        assert member is not None

        def over(directive: Directive) -> bool:
            at = member.view.round
            moved_on = at is not None and at.record.number > number
            return moved_on or isinstance(directive, Finish | Left | Refused)

        directive = await self._await(over, seconds)
        return directive.outcome if isinstance(directive, Finish) else None

    async def _await_left(self) -> None:
        gone = (Left, Finish, Refused)
        await self._await(lambda directive: isinstance(directive, gone), SHUTDOWN_SECONDS)

    def _failure(self) -> Failure | None:
        """What to report of workers that were not told to stop, yet run no more.

        Why they ended is not known here. So it is the class that is excused when a member
        was lost or left at that time, and charged when none was.
        """
        local, identity = self._local, self._settings.config.identity
        seat = self.roster.seat(identity.id) if self.roster else None
        ran = local.workers in (Workers.STARTING, Workers.RUNNING)
        if not ran or seat is None or self._member is None:
            return None
        if not isinstance(self._member.directive, Run):
            return None
        return Failure(
            round=local.round,
            member=identity.id,
            name=identity.name,
            rank=seat.base_rank,
            local_rank=0,
            kind=FailureClass.PEER_ABORT,
            at_ms=int(time.time() * 1000),
            message="its agent came back for another round: a worker of this node failed",
            node=identity.node,
        )

    def _refusal(self, directive: Directive) -> Exception:
        match directive:
            case Finish(outcome):
                if outcome.kind is OutcomeKind.TIMED_OUT:
                    return RendezvousTimeoutError(outcome.detail)
                said = f"{outcome.kind} {outcome.detail}".strip()
                return RendezvousClosedError(f"the run {self._run_id!r} is closed: {said}")
            case Left():
                self._left = True
                return RendezvousGracefulExitError(f"left the run {self._run_id!r}")
            case Refused(reason):
                started = "this member was started" in reason
                kind = RendezvousStateError if started else RendezvousConnectionError
                return kind(reason)
            case _:
                return RendezvousStateError(f"unexpected directive {directive!r}")

    # -- the background loop --------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
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

        self._left = False
        self._thread = threading.Thread(target=run, name="elasticjob-rendezvous", daemon=True)
        self._thread.start()
        ready.wait()
        if failed:
            self._thread = None
            raise RendezvousConnectionError(f"could not start: {failed[0]}") from failed[0]
        self._call(self._await_connected, SHUTDOWN_SECONDS)
        self._hold_port()

    def _call(self, work: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Run a coroutine in the background loop and wait for it."""
        assert self._loop is not None

        async def wrapped() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(seconds)

    def _tell(self, local: Local) -> None:
        self._local = local
        if self._loop is not None and self._member is not None:
            self._loop.call_soon_threadsafe(self._member.tell, local)

    # -- the next round's port ------------------------------------------------------

    def _hold_port(self) -> int:
        """Bind a port for rank 0 to listen on; others can't take it while we hold it."""
        if self._port is None:
            self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("", 0))
        port: int = self._port.getsockname()[1]
        return port

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


def create_handler(parameters: RendezvousParameters) -> EtcdV3RendezvousHandler:
    """A v3 handler from torch's parameters; `parameters.member_settings` lists the settings.

    Raises:
        ValueError: a setting is malformed; it names it.
    """
    settings = member_settings(parameters)
    return EtcdV3RendezvousHandler(settings, parameters.run_id, timeout_seconds(parameters))
