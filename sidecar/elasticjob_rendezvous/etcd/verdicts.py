"""Between directives and a blocking handler: what it reports, and why it gives no place. Pure."""

from __future__ import annotations

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.core.config import Identity
from elasticjob_rendezvous.core.directives import Directive, Finish, Left, RefusalKind, Refused, Run
from elasticjob_rendezvous.core.failures import Failure, FailureClass
from elasticjob_rendezvous.core.local import Local, Workers
from elasticjob_rendezvous.core.records import OutcomeKind
from elasticjob_rendezvous.core.roster import Roster


def failure_of(
    local: Local,
    identity: Identity,
    roster: Roster | None,
    directive: Directive | None,
    utc_ms: int,
) -> Failure | None:
    """What to report of workers that were not told to stop, yet run no more.

    Why they ended is not known here. So it is the class that is excused when a member
    was lost or left at that time, and charged when none was.
    """
    seat = roster.seat(identity.id) if roster else None
    ran = local.workers in (Workers.STARTING, Workers.RUNNING)
    if not ran or seat is None or not isinstance(directive, Run):
        return None
    return Failure(
        round=local.round,
        member=identity.id,
        name=identity.name,
        rank=seat.base_rank,
        local_rank=0,
        kind=FailureClass.PEER_ABORT,
        at_ms=utc_ms,
        message="its agent came back for another round: a worker of this node failed",
        node=identity.node,
    )


def refusal(run_id: str, directive: Directive) -> Exception:
    """The error that says why there is no place."""
    match directive:
        case Finish(outcome):
            if outcome.kind is OutcomeKind.TIMED_OUT:
                return RendezvousTimeoutError(outcome.detail)
            said = f"{outcome.kind} {outcome.detail}".strip()
            return RendezvousClosedError(f"the run {run_id!r} is closed: {said}")
        case Left():
            return RendezvousGracefulExitError(f"left the run {run_id!r}")
        case Refused(reason, RefusalKind.BOUNDS):
            return RendezvousStateError(reason)
        case Refused(reason, RefusalKind.STORE):
            return RendezvousConnectionError(reason)
        case _:
            return RendezvousStateError(f"unexpected directive {directive!r}")
