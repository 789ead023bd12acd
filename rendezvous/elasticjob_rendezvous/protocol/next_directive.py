"""Directive for the agent, derived from the state of the engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.coordinator import failure_policy, repeated_losses
from elasticjob_rendezvous.protocol.coordinator.scale_up import waiting_reason
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Idle, Run, Stop
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, legal_size
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble
from elasticjob_rendezvous.protocol.worker_group import Workers


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the directive besides the facts about this member's own key.

    `safe`: the workers may continue (see `self_fencing`).
    `last_roster`: last roster that this member ran in.
    `late`: the workers are overdue to stop and get no more grace.
    `saving`: the member leaves, but its workers run on to save together with the gang.
    `store`: trouble that makes etcd unusable, or None; members without workers wait for its end.
    `reads_failure`: the failure that ended the job is being read.
    """

    own: MemberKey
    bounds: RendezvousParams | None
    safe: bool
    last_roster: Roster | None
    late: bool = False
    saving: bool = False
    store: StoreTrouble | None = None
    reads_failure: bool = False

    @property
    def grace_seconds(self) -> float:
        return (self.bounds or RendezvousParams(1, 1)).stop_grace_seconds

    @property
    def max_restarts(self) -> int:
        return (self.bounds or RendezvousParams(1, 1)).max_restarts


def direct(facts: Facts) -> Directive:
    """Return the directive for a member that has neither left nor been refused."""
    own = facts.own
    current = own.view.round.record if own.view.round else None
    if current is not None and current.state is RoundState.CLOSED:
        return _finish(facts, current)
    if own.local.workers is not Workers.NONE:
        return _with_workers(facts, current)
    if own.leaving:
        return Idle("leaving")
    if current is None or own.stored is None:
        return Idle("registering" if facts.store is None else facts.store.waiting)
    if _may_start(own, current):
        roster = own.view.rosters[current.number]
        return Run(roster, own.config.identity.id, facts.max_restarts, precedes_stop=True)
    return Idle(_idle_reason(facts, current))


def _idle_reason(facts: Facts, current: Round) -> str:
    """Return the reason for the wait of a member without workers, for people."""
    if facts.store is not None:
        return facts.store.waiting
    text = f"round {current.number} is {current.state}"
    local, bounds = facts.own.local, facts.bounds
    if current.state is RoundState.FINAL and local.done and local.round == current.number:
        return f"{text}: this node is done, and ends when the others do"
    if current.state is RoundState.JOINABLE and current.number == 1 and bounds is not None:
        fewest = f"with at least {bounds.min_nodes} after {bounds.last_call_seconds:g} s"
        return f"{text}: it starts with {bounds.wanted} nodes, or {fewest}"
    if bounds is None or current.state is not RoundState.FINAL:
        return text
    roster = facts.own.view.rosters.get(current.number)
    id = facts.own.config.identity.id
    reasons = [
        repeated_losses.described(row, bounds).text
        for row in repeated_losses.lost_again(current, roster)
        if row.member == id and legal_size(bounds, current.nodes + 1) > current.nodes
    ]
    if bounds.scale_up_wait_seconds > 0 or current.save is not None:
        # A member that does not coordinate knows only of itself.
        reasons.append(waiting_reason(bounds, current.nodes, 1, current.save))
    reason = "; ".join(filter(None, reasons))
    return f"{text}: {reason}" if reason else text


def _with_workers(facts: Facts, current: Round | None) -> Directive:
    own = facts.own
    local = own.local
    if not facts.safe:
        cause = Cause(CauseKind.LOSS, (), "cut off from etcd for longer than the lease")
        return Stop(local.round, True, cause, 0.0)
    if own.leaving and not facts.late and not facts.saving:
        cause = Cause(CauseKind.LEAVE, (own.config.identity.name,), own.leaving)
        return Stop(local.round, False, cause, facts.grace_seconds)
    if current is not None and current.number > local.round:
        kill = current.cause.kills or facts.late
        return Stop(local.round, kill, current.cause, 0.0 if kill else facts.grace_seconds)
    if local.failure is not None:
        cause = Cause(CauseKind.FAILURE, (local.failure.name,), local.failure.message)
        return Stop(local.round, True, cause, 0.0)
    roster = own.view.rosters.get(local.round)
    if roster is None and facts.last_roster and facts.last_roster.number == local.round:
        roster = facts.last_roster
    if roster is None:
        return Idle("workers are running; reading their roster")
    at = current is not None and current.number == local.round and current.state is RoundState.FINAL
    save = current.save if at and current is not None else None
    return Run(roster, own.config.identity.id, facts.max_restarts, save, precedes_stop=True)


def _may_start(own: MemberKey, current: Round) -> bool:
    """Return True on a final round that includes this member, under a valid lease."""
    if current.state is not RoundState.FINAL or not own.local.ready or not own.lease_holds:
        return False
    if own.stored is None or own.stored.record.state is not MemberState.WAITING:
        return False
    roster = own.view.rosters.get(current.number)
    seated = roster is not None and roster.assignment(own.config.identity.id) is not None
    return seated and own.local.round < current.number


def _finish(facts: Facts, current: Round) -> Finish:
    outcome = current.outcome or Outcome(OutcomeKind.STOPPED)
    failures: dict[str, Failure] = {}
    failed = outcome.kind is OutcomeKind.FAILED
    if failed and current.charged:
        failures = facts.own.view.failures_of(current.charged[-1])
    grace_seconds = 0.0 if failed else facts.grace_seconds
    failure = failure_policy.blamed(failures.values(), outcome.culprit)
    return Finish(outcome, failure, grace_seconds, facts.reads_failure)
