"""etcd v3 rendezvous behind torch's `RendezvousHandler`: blocking calls over a background loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import weakref
from dataclasses import replace

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
    reserved_port,
)
from elasticjob_rendezvous.etcd.background import Background
from elasticjob_rendezvous.etcd.forking import is_forked
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND, member_settings, timeout_seconds
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.directives import (
    Directive,
    Finish,
    Idle,
    Left,
    RefusalKind,
    Refused,
    Run,
    Stop,
)
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0
START_SECONDS = 1.0


class HeldPort:
    """Port that is bound without listening, so that no other process can take it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self) -> int:
        """Return the reserved port; the same one until `release`."""
        if self._socket is None:
            self._socket = reserved_port()
        port: int = self._socket.getsockname()[1]
        return port

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def error_of(
    local: Local,
    identity: Identity,
    roster: Roster | None,
    directive: Directive | None,
    utc_ms: int,
) -> Failure | None:
    """Return the failure to report for workers that ended without a request to stop.

    Their error is unknown here. The class is therefore PEER_ABORT: it is not charged if a member
    was lost or left at that time, and charged otherwise.
    """
    assignment = roster.assignment(identity.id) if roster else None
    ran = local.workers in (Workers.STARTING, Workers.RUNNING)
    if not ran or assignment is None or not isinstance(directive, Run):
        return None
    return Failure(
        round=local.round,
        member=identity.id,
        name=identity.name,
        rank=assignment.base_rank,
        local_rank=0,
        kind=FailureClass.PEER_ABORT,
        at_ms=utc_ms,
        message="its agent came back for another round: a worker of this node failed",
        node=identity.node,
    )


def refusal(run_id: str, directive: Directive) -> Exception:
    """Return the error for a directive that gives this node no rank."""
    match directive:
        case Finish(outcome):
            if outcome.kind is OutcomeKind.TIMED_OUT:
                return RendezvousTimeoutError(outcome.detail)
            end = f"{outcome.kind} {outcome.detail}".strip()
            return RendezvousClosedError(f"the run {run_id!r} is closed: {end}")
        case Left():
            return RendezvousGracefulExitError(f"left the run {run_id!r}")
        case Refused(reason, RefusalKind.BOUNDS):
            return RendezvousStateError(reason)
        case Refused(reason, RefusalKind.STORE):
            return RendezvousConnectionError(reason)
        case _:
            return RendezvousStateError(f"unexpected directive {directive!r}")


class EtcdV3RendezvousHandler(RendezvousHandler):
    """Implementation of `api.RendezvousHandler`; `create_handler` creates it and it connects then.

    If garbage collected without `shutdown`, it ends its thread without leaving, and its key in
    etcd expires. In a process forked after its creation, every method that communicates raises
    `RendezvousUnsupportedError`, and `shutdown` returns False.
    """

    def __init__(self, settings: MemberSettings, run_id: str, timeout_seconds: float) -> None:
        self._settings = settings
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._local = Local()
        self._background = Background(settings)
        self._port = HeldPort()
        self._left = False
        self.roster: Roster | None = None
        """Roster of the round that `next_rendezvous` returned last."""
        weakref.finalize(self, self._background.end).atexit = False
        self._start()

    @property
    def settings(self) -> MemberSettings:
        """Settings of its rendezvous member."""
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
            master_port=self._port.hold(),
        )
        directive = self._background.call(self._await_run, self._timeout_seconds + SHUTDOWN_SECONDS)
        if not isinstance(directive, Run):
            self._left = self._left or isinstance(directive, Left)
            raise refusal(self._run_id, directive)
        roster = directive.roster
        assignment = roster.assignment(directive.member)
        assert assignment is not None, "a Run directive has its member's rank assignment"
        self.roster = roster
        self._port.release()
        info = RendezvousStoreInfo(roster.master_address, roster.master_port)
        return RendezvousInfo(None, assignment.group_rank, len(roster.seats), info, roster.number)

    @property
    def is_registered(self) -> bool:
        """True if the member's key is known to exist in etcd."""
        member = self._background.member
        identity = self._settings.config.identity
        return member is not None and member.view.member(identity.id) is not None

    def is_closed(self) -> bool:
        member = self._background.member
        if member is None or member.view.round is None:
            return False
        return member.view.round.record.state is RoundState.CLOSED

    def set_closed(self) -> None:
        self._start()
        outcome = Outcome(OutcomeKind.STOPPED, "closed by an agent")
        self._background.call(lambda: self._await_closed(outcome), SHUTDOWN_SECONDS)

    def num_nodes_waiting(self) -> int:
        """Return more than 0 as soon as this node's workers must stop, for any reason."""
        member = self._background.member
        if member is None or self._local.workers is Workers.NONE:
            return 0
        if not self._background.alive:
            raise RendezvousConnectionError("the rendezvous thread of this node has died")
        if isinstance(member.directive, Run | Idle):
            return 0
        if self._local.workers is not Workers.STOPPING:
            self._report(replace(self._local, workers=Workers.STOPPING))
        waiting = [
            versioned
            for versioned in tuple(member.view.members().values())  # the loop thread may modify it
            if versioned.record.state is MemberState.WAITING
        ]
        return max(1, len(waiting))

    @property
    def grace_seconds(self) -> float:
        """Grace period in seconds for workers that must stop; 0 after a loss."""
        member = self._background.member
        directive = None if member is None else member.directive
        return directive.grace_seconds if isinstance(directive, Stop | Finish) else 0.0

    def report_done(self) -> None:
        """Report that every worker of the last round succeeded on this node."""
        self._report(replace(self._local, workers=Workers.NONE, done=True))

    def wait_end(self, seconds: float) -> Outcome | None:
        """Return the run's outcome, or None if a newer round began. Call after `report_done`.

        Raises:
            TimeoutError: neither happened within the timeout.
        """
        return self._background.call(lambda: self._await_end(seconds), seconds + SHUTDOWN_SECONDS)

    def shutdown(self) -> bool:
        if is_forked():
            log.info("not shutting down %r in a forked process", self._run_id)
            return False
        if not self._background.started:
            return True
        if not self._left:
            self._report(replace(self._local, workers=Workers.NONE, leaving="shutdown"))
            with contextlib.suppress(TimeoutError):
                self._background.call(self._await_left, SHUTDOWN_SECONDS)
        ended = self._background.stop(SHUTDOWN_SECONDS)
        self._port.release()
        return ended

    def _start(self) -> None:
        if self._background.started:
            return
        self._left = False
        self._background.start()
        self._port.hold()

    def _report(self, local: Local) -> None:
        self._local = local
        self._background.report(local)

    def _failure(self) -> Failure | None:
        member = self._background.member
        return error_of(
            self._local,
            self._settings.config.identity,
            self.roster,
            None if member is None else member.directive,
            int(time.time() * 1000),
        )

    # -- waiting, in the loop -------------------------------------------------------

    async def _await_run(self) -> Directive:
        """Announce that this node is ready, and wait for a round newer than the last.

        One call into the loop does both, since every call contends for the GIL.
        """
        member = self._background.member
        assert member is not None
        wanted = self._local.round
        member.report(self._local)

        def enough(directive: Directive) -> bool:
            if isinstance(directive, Run):
                return directive.roster.number > wanted
            return isinstance(directive, Left | Finish | Refused)

        try:
            directive = await self._background.directive(enough, self._timeout_seconds)
        except TimeoutError as error:
            raise RendezvousTimeoutError(
                f"no round of {self._run_id!r} within {self._timeout_seconds:g} s"
            ) from error
        if isinstance(directive, Run):
            self._started(member, directive.roster.number)
        return directive

    def _started(self, member: RendezvousMember, number: int) -> None:
        """Mark the workers as starting now and, START_SECONDS later, as running.

        The caller starts them after the directive and does not report when they run.
        """

        handler = weakref.ref(self)

        def running() -> None:
            ours = handler()
            local = Local() if ours is None else ours._local
            if ours is not None and local.round == number and local.workers is Workers.STARTING:
                ours._local = replace(local, workers=Workers.RUNNING)
                member.report(ours._local)

        self._local = replace(self._local, workers=Workers.STARTING, round=number, failure=None)
        asyncio.get_running_loop().call_later(START_SECONDS, running)

    async def _await_closed(self, outcome: Outcome) -> None:
        member = self._background.member
        assert member is not None
        member.close(outcome)
        await self._background.directive(lambda found: isinstance(found, Finish), SHUTDOWN_SECONDS)

    async def _await_end(self, seconds: float) -> Outcome | None:
        member, number = self._background.member, self._local.round
        assert member is not None

        def over(directive: Directive) -> bool:
            at = member.view.round
            moved_on = at is not None and at.record.number > number
            return moved_on or isinstance(directive, Finish | Left | Refused)

        directive = await self._background.directive(over, seconds)
        return directive.outcome if isinstance(directive, Finish) else None

    async def _await_left(self) -> None:
        gone = (Left, Finish, Refused)
        await self._background.directive(lambda found: isinstance(found, gone), SHUTDOWN_SECONDS)


def create_handler(parameters: RendezvousParameters) -> EtcdV3RendezvousHandler:
    """Create a v3 handler from torch's parameters; see `parameters.member_settings` for them.

    Raises:
        ValueError: a setting is malformed; the message names it.
    """
    settings = member_settings(parameters)
    return EtcdV3RendezvousHandler(settings, parameters.run_id, timeout_seconds(parameters))
