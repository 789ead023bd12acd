"""The v3 rendezvous behind torch's `RendezvousHandler`: blocking calls over a background loop.

For agents that run their workers themselves. The handler takes it that workers run from
the return of `next_rendezvous` to its next call, which is how torch's agents use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

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
    Config,
    Directive,
    Finish,
    Identity,
    Left,
    Local,
    Refused,
    Run,
    Workers,
)
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.records import (
    Bounds,
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.etcd.client import Tls
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember

log = logging.getLogger(__name__)

BACKEND = "elasticjob"
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
        self._start()

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
            failure=None,
            done=False,
            master_port=self._hold_port(),
        )
        directive = self._call(self._await_run, self._timeout_seconds + SHUTDOWN_SECONDS)
        if not isinstance(directive, Run):
            raise self._refusal(directive)
        roster = directive.roster
        seat = roster.seat(directive.member)
        assert seat is not None, "a Run directive seats its member"
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
        member = self._member
        if member is None or member.view.round is None:
            return 0
        if member.view.round.record.number <= self._local.round:
            return 0
        waiting = [
            versioned
            for versioned in tuple(member.view.members().values())  # the loop goes on meanwhile
            if versioned.record.state is MemberState.WAITING
        ]
        return max(1, len(waiting))

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

        self._local = replace(self._local, workers=Workers.STARTING, round=number)
        asyncio.get_running_loop().call_later(START_SECONDS, running)

    async def _await_closed(self, outcome: Outcome) -> None:
        assert self._member is not None
        self._member.close(outcome)
        await self._await(lambda directive: isinstance(directive, Finish), SHUTDOWN_SECONDS)

    async def _await_left(self) -> None:
        gone = (Left, Finish, Refused)
        await self._await(lambda directive: isinstance(directive, gone), SHUTDOWN_SECONDS)

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
                await member.wait_connected(CONNECT_PATIENCE_SECONDS)
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
        self._release_port()
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        self._port = held
        port: int = held.getsockname()[1]
        return port

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


def create_handler(parameters: RendezvousParameters) -> EtcdV3RendezvousHandler:
    """A v3 handler from torch's parameters.

    Settings: `timeout` or `join_timeout`, `last_call_timeout`, `keep_alive_seconds`,
    `confirm_seconds`, `connect_timeout`, `protocol` (http or https), `cacert`, `cert`,
    `key`, `user`, `password`, `namespace`, `job_key`, `node_name`, `slots`, `role`.

    Raises:
        ValueError: a setting is malformed; it names it.
    """
    get_float = parameters.get_as_float
    timeout = get_float("timeout") or get_float("join_timeout") or 600.0
    last_call = get_float("last_call_timeout")
    bounds = Bounds(
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        join_timeout_seconds=timeout,
        last_call_seconds=30.0 if last_call is None else last_call,
        keep_alive_seconds=get_float("keep_alive_seconds") or 5.0,
        confirm_seconds=get_float("confirm_seconds") or 5.0,
    )
    nonce = secrets.token_hex(8)
    address = parameters.local_addr or _own_address()
    identity = Identity(
        id=nonce,
        name=str(parameters.get("node_name") or f"{socket.gethostname()}-{os.getpid()}"),
        address=address,
        agent_port=0,
        slots=parameters.get_as_int("slots") or 1,
        role=str(parameters.get("role") or "default"),
    )
    config = Config(
        prefix=job_prefix(str(parameters.get("namespace") or "default"), parameters.run_id, 0),
        identity=identity,
        session_nonce=nonce,
        bounds=bounds,
        jitter=random.random(),
        keep_alive_seconds=bounds.keep_alive_seconds,
        connect_seconds=get_float("connect_timeout") or 30.0,
    )
    secret = str(parameters.get("job_key") or parameters.run_id)
    settings = MemberSettings(
        endpoints=_endpoints(parameters),
        config=config,
        job_key=hashlib.sha256(secret.encode()).digest(),
        tls=_tls(parameters),
        user=parameters.get("user"),
        password=parameters.get("password"),
    )
    return EtcdV3RendezvousHandler(settings, parameters.run_id, timeout)


def _endpoints(parameters: RendezvousParameters) -> tuple[str, ...]:
    protocol = str(parameters.get("protocol") or "http")
    if protocol not in ("http", "https"):
        raise ValueError(f"the rendezvous setting 'protocol' must be http or https: {protocol!r}")
    named = [part.strip() for part in parameters.endpoint.split(",") if part.strip()]
    if not named:
        raise ValueError("the rendezvous endpoint must name at least one host:port")
    return tuple(part if "://" in part else f"{protocol}://{part}" for part in named)


def _tls(parameters: RendezvousParameters) -> Tls | None:
    files: dict[str, Any] = {
        "ca_file": parameters.get("cacert"),
        "cert_file": parameters.get("cert"),
        "key_file": parameters.get("key"),
    }
    if not any(files.values()):
        return None
    return Tls(**files)


def _own_address() -> str:
    """The address by which this host is known to itself; loopback where it has no other."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
