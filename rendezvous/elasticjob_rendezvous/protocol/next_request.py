"""Next request of a member to etcd: one at a time, the most urgent first. No I/O.

The order is: register, read the state, write this member's own key, then act as coordinator.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol import leaving, session
from elasticjob_rendezvous.protocol import member_key as own_key
from elasticjob_rendezvous.protocol.coordinator import election
from elasticjob_rendezvous.protocol.directives import RefusalKind, Refused
from elasticjob_rendezvous.protocol.effects import Grant, Read, Write
from elasticjob_rendezvous.protocol.kv import Range, Txn
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.members import Member, OutcomeKind, RoundState
from elasticjob_rendezvous.protocol.records.params import LEAST_KEEP_ALIVE_SECONDS
from elasticjob_rendezvous.protocol.replica import Versioned
from elasticjob_rendezvous.protocol.requests import Request
from elasticjob_rendezvous.protocol.state import EngineState

FAILURE_SECONDS = 3.0
"""Maximum time in which an agent waits for the failure that ended the job."""


def next_request(state: EngineState) -> Request | None:
    """Return the request that is due, if there is one."""
    own = state.own
    if state.refused or state.left:
        return Write(own_key.delete(own, own.stored)) if own.stored else None
    if not state.session:
        return _register(state, own)
    if not state.watches.ready:
        return None
    if state.doubt or state.leader_link.read_due(state.now, state.alarm):
        return _read_all(state, own)
    if _idle_too_long(state):
        return _read_all(state, own)
    if (missing := _missing_records(state)) is not None:
        return missing
    if own.stored is None:
        session.lose(state, "its key is gone")
        return _register(state, state.own)
    if reason := own_key.disagreement(own):
        state.refused = Refused(reason, RefusalKind.BOUNDS)
        return Write(own_key.delete(own, own.stored))
    txn = _member_key_write(state, own, own.stored)
    return Write(txn) if txn is not None else election.next_request(state, own, own.stored)


def _register(state: EngineState, own: MemberKey) -> Request | None:
    """Create this member's session; read the round first if the member has a past."""
    local, idle = state.local, state.worker_group.idle
    if own.leaving and idle:
        state.left = True
        return None
    if state.round_is(RoundState.CLOSED):
        return None
    if not state.lease.holds(state.now):
        state.lease.ttl_seconds = max(LEAST_KEEP_ALIVE_SECONDS, round(state.keep_alive_seconds))
        return Grant(state.lease.ttl_seconds)
    if idle and not local.ready:
        return None
    carries = not idle or local.round > 0 or state.sessions > 0
    if state.doubt and carries:
        return _read_all(state, own) if state.watches.ready else None
    at = state.current
    if not idle and at is not None and at.number > local.round:
        return None  # fenced while workers stop: register again when none runs
    if not state.watches.ready:
        return None
    session.begin(state)
    return Write(own_key.create(state.own, carries))


def _read_all(state: EngineState, own: MemberKey) -> Read:
    """Read all keys that this member's role requires, at one revision."""
    if state.coordinator.active:
        return Read(state.everything)
    return Read((*own.required_ranges, own.folder))


def _idle_too_long(state: EngineState) -> bool:
    """Return True if the member has waited so long that its key may have been deleted."""
    if state.coordinator.active or not state.worker_group.idle:
        return False
    return state.alarm.passed(state.checked_at + 2 * state.keep_alive_seconds, state.now)


def _missing_records(state: EngineState) -> Read | None:
    """Read the roster of a final round, or the failures that closed the job, if missing."""
    current = state.current
    if current is None or state.coordinator.active:
        return None
    number = current.number
    final = current.state is RoundState.FINAL
    roster = Range(state.keys.roster(number))
    if final and number not in state.view.rosters and roster.key not in state.answered:
        return Read((roster,))
    failures = _failures_of_end(state)
    return Read((failures,)) if failures is not None else None


def reads_failure(state: EngineState) -> bool:
    """Return True while the failure that ended the job is being read, for a limited time."""
    if not state.session:
        return False  # then nothing is read: this member may never have taken part
    if _failures_of_end(state) is None or state.current is None or state.closed_at is None:
        return False
    outcome, known = state.current.outcome, state.view.failures_of(state.current.charged[-1])
    if outcome is None or outcome.culprit in known:
        return False
    return not state.alarm.passed(state.closed_at + FAILURE_SECONDS, state.now)


def _failures_of_end(state: EngineState) -> Range | None:
    """Return the range of the failures that ended the job, unless they were read."""
    current = state.current
    if current is None or state.coordinator.active:
        return None
    failed = current.outcome is not None and current.outcome.kind is OutcomeKind.FAILED
    if not failed or not current.charged:
        return None
    failures = Range(state.keys.failures(current.charged[-1]), prefix=True)
    return None if failures.key in state.answered else failures


def _member_key_write(state: EngineState, own: MemberKey, stored: Versioned[Member]) -> Txn | None:
    """Return the write due for this member's key, or the end of the job if its agent wants it."""
    if state.round_is(RoundState.CLOSED):
        return own_key.delete(own, stored) if state.worker_group.idle else None
    if state.close is not None and (
        txn := own_key.close(own, stored, state.close, state.clock.utc_ms)
    ):
        return txn
    if own.leaving:
        return own_key.report(own, stored) or leaving.next_write(state, own, stored)
    return own_key.update(own, stored)
