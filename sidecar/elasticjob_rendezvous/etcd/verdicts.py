"""Conversion of directives to the failures and errors of a blocking handler. No I/O."""

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
    """Return the failure to report for workers that ended without a request to stop.

    Their cause of death is unknown here. PEER_ABORT is therefore used: it is not charged if a
    member was lost or left at that time, and charged otherwise.
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
    """Return the error for a directive that gives this node no rank."""
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
