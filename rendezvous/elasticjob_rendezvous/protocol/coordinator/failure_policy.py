"""Charging rules: failures that count against the budget, and the time of the decision. Pure.

A failure with a cause of its own is charged immediately. An aborted collective, or one that timed
out, is charged only if no member of its round is lost or leaves within the duration of a lease plus
one second: the loss of a node first shows as aborted collectives of its peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elasticjob_rendezvous.protocol.records.failures import ECHOES, Failure, FailureClass, exit_text
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Done
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import first_line

MASTER_PORT_RETRIES = 3
KEPT_FAILURES = 16
"""Maximum number of failures kept per round: in a large gang all fail, and most for one reason."""
LINE_CHARACTERS = 160
"""Maximum length of a failure's text in a cause or an outcome."""
_CONSEQUENCES = ECHOES | {FailureClass.MASTER_PORT}
_REMOTENESS = {
    FailureClass.MASTER_PORT: 1,
    FailureClass.COLLECTIVE_TIMEOUT: 2,
    FailureClass.PEER_ABORT: 3,
}
"""Distance from the cause: a worker whose wait timed out then broke its peers' collectives."""


def window_seconds(bounds: RendezvousParams) -> float:
    """Return the time to wait for a loss or a leave before a failure is charged."""
    return bounds.keep_alive_seconds + 1.0


def includes_cause(failures: Iterable[Failure]) -> bool:
    """Return True if any of these failures is a cause and not a consequence."""
    return any(failure.kind not in _CONSEQUENCES for failure in failures)


def port_taken(failures: Iterable[Failure]) -> bool:
    """Return True if the round failed only because MASTER_PORT could not be bound."""
    kinds = {failure.kind for failure in failures}
    return FailureClass.MASTER_PORT in kinds and kinds <= _CONSEQUENCES


def culprit(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure to show: causes before consequences, then the earliest."""
    return min(failures, key=_remoteness, default=None)


def blamed(failures: Iterable[Failure], member: str) -> Failure | None:
    """Return the failure that ended the job: that of `member`, where it is known.

    Other failures of that round may have been reported since, and one of them may be earlier.
    """
    known = list(failures)
    return culprit([each for each in known if each.member == member] or known)


def cause_of(failures: Iterable[Failure], done: Iterable[Done] = ()) -> Cause | None:
    """Return the cause of a round's end by these failures; None without any."""
    known = list(failures)
    first = culprit(known)
    if first is None:
        return None
    kind = CauseKind.MASTER_PORT if port_taken(known) else CauseKind.FAILURE
    return Cause(kind, (first.name,), failures_text(known, done))


def failures_text(failures: Iterable[Failure], done: Iterable[Done] = ()) -> str:
    """Return the text for these failures of one round; `done` are its members that succeeded.

    Where workers only noticed that a peer was gone, one that ended too early is the likely reason.
    """
    known = list(failures)
    first = culprit(known)
    if first is None:
        return "a worker failed"
    ended = sorted((each.name for each in done), key=natural_order)
    if not ended or includes_cause(known):
        return describe(first)
    worker = ended[0] if len(ended) == 1 else f"{ended[0]} and {len(ended) - 1} more"
    return f"{describe(first)}; by then {worker} had ended with success"


def surplus(failures: Mapping[str, Failure]) -> list[str]:
    """Return the members whose failures need not be kept: those farthest from the cause."""
    return sorted(failures, key=lambda member: _remoteness(failures[member]))[KEPT_FAILURES:]


def is_redundant(failure: Failure, known: Iterable[Failure]) -> bool:
    """Return True if enough failures are known that are at least as close to the cause."""
    far = _REMOTENESS.get(failure.kind, 0)
    as_near = [other for other in known if _REMOTENESS.get(other.kind, 0) <= far]
    return len(as_near) >= KEPT_FAILURES


def _remoteness(failure: Failure) -> tuple[int, int, int]:
    return (_REMOTENESS.get(failure.kind, 0), failure.at_ms, failure.rank)


def describe(failure: Failure) -> str:
    """Return one line about the failure, for people."""
    worker = f"rank {failure.rank}" if failure.rank >= 0 else f"local rank {failure.local_rank}"
    message = first_line(failure.message, LINE_CHARACTERS)
    if failure.kind is FailureClass.HANG:
        how = "hung"  # the launcher sent the signal that ended it
    elif failure.signal is not None:
        how = f"ended with signal {failure.signal}"
    elif failure.exit_code is not None:
        exit_ = exit_text(failure.exit_code)
        if failure.describes_exit is None:  # the previous release: the message may repeat the exit
            message = message.removeprefix(exit_).lstrip(":; ")
        elif failure.describes_exit and message:
            exit_, message = message, ""
        how = f"ended with {exit_}"
    else:
        how = "failed"
    return f"{worker} on {failure.name} {how}" + (f": {message}" if message else "")


def is_budget_spent(charged: Iterable[int], bounds: RendezvousParams) -> bool:
    """Return True if more failures were charged than `maxRestarts` permits."""
    return len(tuple(charged)) > bounds.max_restarts
