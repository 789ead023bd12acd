"""Job records of an agent that polls a handler, in the form that etcd v3 would hold.

Only this agent observes its part of the job: `observe_step` updates its observations with each step
of `core.poll_step.poll_step`, and `records` returns them in the form of
`elasticjob_rendezvous.protocol.records.members`.
`elasticjob_rendezvous.protocol.records.agent_reports` merges them with
those of the other agents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_agent.core.poll_step import Phase, PollingState
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.directives import Finish, Stop
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Done,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

KEEP = 10
"""Number of rounds to report."""
START = Cause(CauseKind.START)


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """Observations so far.

    Args:
        number: the round that is open, final or closed, as far as this agent knows; 0 before the
            first.
        state: state of that round.
        cause: cause of that round.
        since_ms: time at which the round entered that state.
        stopping_ms, seeking_ms: time at which the last round ended for this agent, and time at
            which none of its processes was left.
        charged: rounds charged to the restart budget; numbers below 1 stand for charges before
            this agent joined.
        outcome: the job's outcome.
    """

    number: int = 0
    state: RoundState = RoundState.JOINABLE
    cause: Cause = START
    since_ms: int = 0
    stopping_ms: int | None = None
    seeking_ms: int | None = None
    charged: tuple[int, ...] = ()
    outcome: Outcome | None = None
    rosters: tuple[Roster, ...] = ()
    histories: tuple[History, ...] = ()
    failures: tuple[Failure, ...] = ()
    dones: tuple[Done, ...] = ()


def observe_step(
    known: ObservedJob, before: PollingState, after: PollingState, identity: Identity, utc_ms: int
) -> ObservedJob:
    """Return the observations after a step."""
    known = _observe_workers(known, after, identity)
    if after.phase is before.phase:
        return known
    match after.phase:
        case Phase.STOPPING | Phase.JOINING:
            return _end_round(known, before, after, utc_ms)
        case Phase.SEATED:
            return _begin_round(known, after, utc_ms)
        case Phase.OVER:
            return _close_round(known, after, identity, utc_ms)
    return known


def _observe_workers(known: ObservedJob, after: PollingState, identity: Identity) -> ObservedJob:
    local = after.local
    failure = local.failure
    if failure is not None and all(record.round != failure.round for record in known.failures):
        known = replace(known, failures=(*known.failures, failure)[-KEEP:])
    if local.done and all(record.round != local.round for record in known.dones):
        done = Done(local.round, identity.id, identity.name)
        known = replace(known, dones=(*known.dones, done)[-KEEP:])
    last = known.histories[-1] if known.histories else None
    if last is not None and local.start_ms and local.round == last.number and not last.start_ms:
        nodes = None if local.cold is None else int(local.cold != "")
        last = replace(
            last, start_ms=local.start_ms, cold_nodes=nodes, cold_reason=local.cold or ""
        )
        known = replace(known, histories=(*known.histories[:-1], last))
    elif last is not None and local.round == last.number and not last.first_step_ms:
        last = replace(last, first_step_ms=local.first_step_ms or None)
        if local.first_step_ms and local.lost_steps >= 0:
            steps, ms = local.lost_steps, local.lost_ms
            last = replace(last, lost_steps=steps, lost_ms=ms, lost_reason=local.lost_reason)
        known = replace(known, histories=(*known.histories[:-1], last))
    return known


def _end_round(
    known: ObservedJob, before: PollingState, after: PollingState, utc_ms: int
) -> ObservedJob:
    """Record the end of a round, which opens the next one."""
    if known.state is not RoundState.JOINABLE or known.number == 0:
        known = replace(
            known,
            number=after.number + 1,
            state=RoundState.JOINABLE,
            cause=_cause(before, after),
            since_ms=utc_ms,
            stopping_ms=utc_ms,
        )
    return replace(known, seeking_ms=utc_ms) if after.phase is Phase.JOINING else known


def _cause(before: PollingState, after: PollingState) -> Cause:
    failure = after.local.failure
    if failure is not None and failure.round == after.number:
        return Cause(CauseKind.FAILURE, (failure.name,), failure.message)
    for directive in (after.directive, before.directive):
        if isinstance(directive, Stop):
            return directive.cause
    return START if after.number == 0 else Cause(CauseKind.JOIN)


def _begin_round(known: ObservedJob, after: PollingState, utc_ms: int) -> ObservedJob:
    roster = getattr(after.directive, "roster", None)
    if not isinstance(roster, Roster):
        return known
    history = History(
        number=roster.number,
        cause=known.cause,
        nodes=len(roster.seats),
        final_ms=utc_ms,
        stop_ms=_duration_ms(known.stopping_ms, known.seeking_ms) if known.rosters else None,
        join_ms=_duration_ms(known.seeking_ms, utc_ms),
    )
    new = max(0, after.restarts - len(known.charged))
    last = known.rosters[-1].number if known.rosters else 0
    return replace(
        known,
        number=roster.number,
        state=RoundState.FINAL,
        since_ms=utc_ms,
        charged=(*known.charged, *(last - index for index in reversed(range(new)))),
        rosters=(*known.rosters, roster)[-KEEP:],
        histories=(*known.histories, history)[-KEEP:],
    )


def _duration_ms(began_ms: int | None, ended_ms: int | None) -> int | None:
    return None if began_ms is None or ended_ms is None else max(0, ended_ms - began_ms)


def _close_round(
    known: ObservedJob, after: PollingState, identity: Identity, utc_ms: int
) -> ObservedJob:
    """Close the round if the job ended, not if only this node left or lost contact."""
    if not isinstance(after.directive, Finish) or after.alone:
        return known
    outcome = after.directive.outcome
    known = replace(
        known,
        number=max(1, known.number),
        state=RoundState.CLOSED,
        since_ms=utc_ms,
        outcome=outcome,
    )
    failure = after.directive.failure
    if outcome.kind is OutcomeKind.FAILED and failure is not None and failure.member == identity.id:
        return replace(known, charged=tuple(dict.fromkeys((*known.charged, failure.round))))
    return known


# -- records ------------------------------------------------------------------------


def records(
    known: ObservedJob,
    state: PollingState,
    identity: Identity,
    session: str,
    prefix: str,
    bounds: RendezvousParams,
) -> dict[str, object]:
    """Return the records by key. Of other members only their rank assignments are known."""
    keys = Keys(prefix)
    found: dict[str, object] = {keys.bounds: bounds}
    if known.number:
        found[keys.round] = _round(known)
    member = _member(state, identity, session)
    if member is not None:
        found[keys.session(identity.id, session)] = member
    for roster in known.rosters:
        found[keys.roster(roster.number)] = _named(roster, identity)
    for history in known.histories:
        found[keys.history(history.number)] = history
    for failure in known.failures:
        found[keys.failure(failure.round, identity.id)] = failure
    for done in known.dones:
        found[keys.done(done.round, identity.id)] = done
    return found


def _round(known: ObservedJob) -> Round:
    roster = known.rosters[-1] if known.rosters else None
    current = Round(
        number=known.number,
        state=known.state,
        cause=known.cause,
        charged=known.charged,
        outcome=known.outcome,
        since_ms=known.since_ms,
    )
    if roster is None:
        return current
    return replace(
        current,
        previous=roster.number if roster.number < known.number else 0,
        nodes=len(roster.seats),
        world_size=roster.world_size,
        master_address=roster.master_address,
        master_port=roster.master_port,
    )


def _named(roster: Roster, identity: Identity) -> Roster:
    """Return the roster with this agent's display name; a handler's roster has no names."""
    seats = tuple(
        assignment._replace(name=identity.name, address=identity.address, node=identity.node)
        if assignment.id == identity.id
        else assignment
        for assignment in roster.seats
    )
    return replace(roster, seats=seats)


def _member(state: PollingState, identity: Identity, session: str) -> Member | None:
    """Return the member record; None before the launcher connects and after this node left."""
    local = state.local
    finished = isinstance(state.directive, Finish)
    if state.phase is Phase.OUT or (state.phase is Phase.OVER and not finished):
        return None
    return Member(
        id=identity.id,
        session=session,
        name=identity.name,
        address=identity.address,
        agent_port=identity.agent_port,
        slots=identity.slots,
        role=identity.role,
        node=identity.node,
        launch=identity.launch,
        state=_member_state(local, state.phase),
        round=local.round,
        reason=local.leaving,
        start_ms=local.start_ms,
        cold=local.cold,
        stopped=bool(local.leaving) and local.workers is Workers.NONE,
    )


def _member_state(local: Local, phase: Phase) -> MemberState:
    """Return the member's state; a done member that rejoins no longer counts as done."""
    if local.leaving:
        return MemberState.LEAVING
    match local.workers:
        case Workers.STARTING | Workers.RUNNING:
            return MemberState.RUNNING
        case Workers.STOPPING:
            return MemberState.STOPPING
    done = local.done and phase is not Phase.JOINING
    return MemberState.DONE if done else MemberState.WAITING
