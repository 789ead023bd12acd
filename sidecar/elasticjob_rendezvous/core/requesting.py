"""Next request to etcd of a member: one at a time, the most urgent first. No I/O.

The member must first know the state, then its own key must be up to date; its work as coordinator
comes last.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import leaving, sessions, succession
from elasticjob_rendezvous.core import own as own_key
from elasticjob_rendezvous.core.bounds import LEAST_KEEP_ALIVE_SECONDS
from elasticjob_rendezvous.core.directives import RefusalKind, Refused
from elasticjob_rendezvous.core.effects import Grant, Read, Write
from elasticjob_rendezvous.core.inflight import Request
from elasticjob_rendezvous.core.kv import Range, Txn
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.own import Own
from elasticjob_rendezvous.core.records import Member, OutcomeKind, RoundState
from elasticjob_rendezvous.core.view import Versioned


def next_request(our: Membership) -> Request | None:
    """Return the request that is due, if there is one."""
    own = our.own
    if our.refused or our.left:
        return Write(own_key.drop(own, own.stored)) if own.stored else None
    if not our.session:
        return _enter(our, own)
    if not our.watches.ready:
        return None
    if our.doubt or our.leadership.look_due(our.now, our.alarm):
        return _look(our, own)
    if _idle_too_long(our):
        return _look(our, own)
    if (missing := _missing(our)) is not None:
        return missing
    if own.stored is None:
        sessions.lose(our, "its key is gone")
        return _enter(our, our.own)
    if reason := own_key.disagreement(own):
        our.refused = Refused(reason, RefusalKind.BOUNDS)
        return Write(own_key.drop(own, own.stored))
    txn = _own_write(our, own, own.stored)
    return Write(txn) if txn is not None else succession.next_write(our, own, own.stored)


def _enter(our: Membership, own: Own) -> Request | None:
    """Create this member's session; read the round first if the member has a past."""
    local, idle = our.local, our.crew.idle
    if own.leaving and idle:
        our.left = True
        return None
    if our.round_is(RoundState.CLOSED):
        return None
    if not our.lease.holds(our.now):
        our.lease.ttl_seconds = max(LEAST_KEEP_ALIVE_SECONDS, round(our.keep_alive_seconds))
        return Grant(our.lease.ttl_seconds)
    if idle and not local.ready:
        return None
    carries = not idle or local.round > 0 or our.sessions > 0
    if our.doubt and carries:
        return _look(our, own) if our.watches.ready else None
    at = our.current
    if not idle and at is not None and at.number > local.round:
        return None  # fenced while workers stop: register again when none runs
    if not our.watches.ready:
        return None
    sessions.begin(our)
    return Write(own_key.take_up(our.own, carries))


def _look(our: Membership, own: Own) -> Read:
    """Read everything that this member's part needs, at one revision."""
    if our.coordinator.active:
        return Read(our.everything)
    return Read((*own.look, own.folder))


def _idle_too_long(our: Membership) -> bool:
    """Return True if the member has waited so long that its key may have been deleted."""
    if our.coordinator.active or not our.crew.idle:
        return False
    return our.alarm.passed(our.looked_at + 2 * our.keep_alive_seconds, our.now)


def _missing(our: Membership) -> Read | None:
    """Read the roster of a final round, or the failures that closed the job, if missing."""
    current = our.current
    if current is None or our.coordinator.active:
        return None
    number = current.number
    final = current.state is RoundState.FINAL
    roster = Range(our.keys.roster(number))
    if final and number not in our.view.rosters and roster.key not in our.answered:
        return Read((roster,))
    failed = current.outcome is not None and current.outcome.kind is OutcomeKind.FAILED
    if failed and current.charged:
        failures = Range(our.keys.failures(current.charged[-1]), prefix=True)
        return Read((failures,)) if failures.key not in our.answered else None
    return None


def _own_write(our: Membership, own: Own, stored: Versioned[Member]) -> Txn | None:
    """Return the write due for this member's key, or the end of the job if its agent wants it."""
    if our.round_is(RoundState.CLOSED):
        return own_key.drop(own, stored) if our.crew.idle else None
    if our.close is not None and (txn := own_key.close(own, stored, our.close, our.clock.utc_ms)):
        return txn
    if own.leaving:
        return own_key.report(own, stored) or leaving.next_write(our, own, stored)
    return own_key.update(own, stored)
