"""Content of this member's key, and the transactions that write it. Pure functions.

Each write to the own key compares its mod_revision, so a fenced session writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_rendezvous.protocol.config import Config
from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Op, Order, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    ASIDE,
    Done,
    Member,
    MemberState,
    Outcome,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.replica import Versioned, View
from elasticjob_rendezvous.protocol.worker_group import Local, Workers


@dataclass(frozen=True, slots=True)
class MemberKey:
    """Inputs of the transactions on the member key.

    `leaving` is the reason for the leave, empty for a member that stays; `known` the highest round
    number ever seen. Without `lease_holds` the lease may have expired, so the member confirms no
    round.
    """

    config: Config
    view: View
    local: Local
    session: str
    lease: int
    lease_holds: bool
    leaving: str
    known: int

    @property
    def key(self) -> str:
        return self.view.keys.session(self.config.identity.id, self.session)

    @property
    def folder(self) -> Range:
        return Range(self.view.keys.sessions(self.config.identity.id), prefix=True)

    @property
    def stored(self) -> Versioned[Member] | None:
        """Key of this member as it stands in etcd, as far as known."""
        return self.view.sessions.get(self.config.identity.id, {}).get(self.session)

    @property
    def required_ranges(self) -> tuple[Range, ...]:
        """Ranges that a member other than the coordinator must read: the state, the coordinator."""
        keys = self.view.keys
        skipped = sum(key.startswith(keys.members) for key in self.view.malformed)
        lowest = Range(keys.members, prefix=True, order=Order.CREATE, limit=1 + skipped)
        return (Range(keys.state, prefix=True), lowest)

    def state(self) -> MemberState:
        if self.leaving:
            return MemberState.LEAVING
        match self.local.workers:
            case Workers.STARTING | Workers.RUNNING:
                return MemberState.RUNNING
            case Workers.STOPPING:
                return MemberState.STOPPING
        at = self.view.round
        moved_on = at is not None and at.record.number > self.local.round
        return MemberState.DONE if self.local.done and not moved_on else MemberState.WAITING

    def _ran(self) -> int:
        """Return the highest round of which a worker ran here, or whose workers will never start.

        Once a member has read that a newer round is open, it starts no worker of the one before.
        """
        at = self.view.round
        if at is None or self.local.workers is not Workers.NONE:
            return self.local.round
        if at.record.state not in (RoundState.JOINABLE, RoundState.FROZEN):
            return self.local.round
        previous = at.record.previous
        roster = self.view.rosters.get(previous)
        is_newcomer = roster is not None and roster.assignment(self.config.identity.id) is None
        return self.local.round if is_newcomer else max(self.local.round, previous)

    def record(self, confirmed: int = 0, known: int | None = None) -> Member:
        """Return the record to write to this member's key.

        `confirmed` is the revision of the frozen round to confirm; `known` replaces the highest
        known round number.
        """
        identity, local = self.config.identity, self.local
        return Member(
            id=identity.id,
            session=self.session,
            name=identity.name,
            address=identity.address,
            agent_port=identity.agent_port,
            launcher_port=identity.launcher_port,
            slots=identity.slots,
            role=identity.role,
            node=identity.node,
            launch=identity.launch,
            state=self.state(),
            round=self._ran(),
            confirmed=confirmed,
            master_port=local.master_port,
            lease=self.lease,
            known=self.known if known is None else known,
            reason=self.leaving,
            start_ms=local.start_ms if local.workers is Workers.RUNNING else 0,
            sizes=self.config.bounds.sizes if self.config.bounds else "",
            stopped=bool(self.leaving) and local.workers is Workers.NONE,
            first_step_ms=local.first_step_ms if local.workers is Workers.RUNNING else 0,
            step=local.step,
            checkpoint_step=local.checkpoint_step,
            master_served=local.master_served,
            busy_ms=local.busy_ms,
            saves=local.saves,
            keeps=local.keeps,
            restore=local.restore,
            passed=local.passed,
            saved=local.saved,
            completed=local.completed,
            save_error=local.save_error,
            cold=local.cold if local.workers is Workers.RUNNING else None,
            lost_steps=local.lost_steps if local.workers is Workers.RUNNING else -1,
            lost_ms=local.lost_ms if local.workers is Workers.RUNNING else 0,
            lost_reason=local.lost_reason if local.workers is Workers.RUNNING else "",
            snapshots=local.snapshots,
            ended_round=local.ended_round,
            ended_step=local.ended_step,
            cut_off_round=local.cut_off_round,
        )


def create(own: MemberKey, carries: bool) -> Txn:
    """Create this member's key in place of its old ones, and read the current state.

    `carries` is True if the record describes earlier workers of this member. It is then valid only
    for the round that the member knows, so the transaction requires that round to be unchanged.
    """
    compares = [Compare(own.key, Target.CREATE, 0)]
    ops: list[Op] = [Put(own.key, encode(own.record()), own.lease)]
    if carries:
        number = own.view.round.modified if own.view.round else 0
        compares.append(Compare(own.view.keys.round, Target.MOD, number))
        for old in own.view.sessions.get(own.config.identity.id, {}).values():
            compares.append(Compare(old.key, Target.MOD, old.modified))
            ops.append(Delete(old.key))
    reads = (*own.required_ranges, own.folder)
    return Txn(tuple(compares), (*ops, *reads), reads)


def delete(own: MemberKey, stored: Versioned[Member]) -> Txn:
    """Delete this member's key."""
    unchanged = Compare(stored.key, Target.MOD, stored.modified)
    return Txn((unchanged,), (Delete(stored.key),), (own.folder,))


def recreate(own: MemberKey, stored: Versioned[Member]) -> Txn:
    """Resign as coordinator: delete this member's key and create it again as the youngest."""
    unchanged = Compare(stored.key, Target.MOD, stored.modified)
    put = Put(own.key, encode(own.record()), own.lease)
    return Txn((unchanged,), (Delete(stored.key), put, *own.required_ranges), (own.folder,))


def write_leaving(own: MemberKey, stored: Versioned[Member]) -> Txn | None:
    record = own.record()
    if stored.record.state is MemberState.LEAVING and _repeats_leave(stored.record, record):
        return None
    unchanged = Compare(stored.key, Target.MOD, stored.modified)
    put = Put(stored.key, encode(record), own.lease)
    return Txn((unchanged,), (put,), (own.folder,))


def _repeats_leave(stored: Member, now: Member) -> bool:
    names = ("stopped", "saves", "keeps", "restore", "passed", "saved", "completed", "save_error")
    return all(getattr(stored, name) == getattr(now, name) for name in names)


def update(own: MemberKey, stored: Versioned[Member]) -> Txn | None:
    """Bring this member's key up to date; None when no change is worth a request."""
    local = own.local
    confirmed = _confirmation(own, stored.record)
    # Knowledge of a newer round alone is not worth a request.
    record = own.record(confirmed, known=stored.record.known)
    ops: list[Op] = []
    if local.failure is not None and _is_news(own.view, local.failure):
        key = own.view.keys.failure(local.failure.round, local.failure.member)
        ops.append(Put(key, encode(local.failure)))
    known_done = record.id in own.view.dones.get(local.round, {})
    if record.state is MemberState.DONE and not known_done:
        done = Done(local.round, record.id, record.name)
        ops.append(Put(own.view.keys.done(local.round, record.id), encode(done)))
    if not ops:
        if local.workers in (Workers.STARTING, Workers.STOPPING):
            return None  # others need not know before it runs or has stopped
        if record == stored.record:
            return None
    unchanged = Compare(stored.key, Target.MOD, stored.modified)
    put = Put(stored.key, encode(own.record(confirmed)), own.lease)
    return Txn((unchanged,), (put, *ops), (Range(own.view.keys.round), own.folder))


def report(own: MemberKey, stored: Versioned[Member]) -> Txn | None:
    """Return the report of this member's failure, if it is still due."""
    failure = own.local.failure
    return update(own, stored) if failure and _is_news(own.view, failure) else None


def _is_news(view: View, failure: Failure) -> bool:
    """Return True if the failure is still to be reported.

    A mere consequence is not, once a newer round is open. Nor is a failure in a round whose number
    others sealed again after etcd lost its data.
    """
    known = view.failures.get(failure.round, {})
    if failure.member in known or failure_policy.is_redundant(failure, known.values()):
        return False
    roster = view.rosters.get(failure.round)
    if roster is not None and roster.assignment(failure.member) is None:
        return False
    number = view.round.record.number if view.round else failure.round
    if number == failure.round:
        return True
    return number == failure.round + 1 and failure_policy.includes_cause((failure,))


def _confirmation(own: MemberKey, stored: Member) -> int:
    """Return the frozen revision to confirm, or the one confirmed before."""
    at = own.view.round
    if at is None or own.state() is not MemberState.WAITING:
        return 0
    must_confirm = at.record.state is RoundState.FROZEN and own.config.identity.id in at.record.ids
    if must_confirm and own.local.ready and own.lease_holds:
        return at.modified
    return stored.confirmed


def disagreement(own: MemberKey) -> str:
    """Return the difference between this member's sizes and the job's; empty without one.

    Outside Kubernetes all members must bring the same sizes.
    """
    mine, there = own.config.bounds, own.view.bounds
    if mine is None or there is None:
        return ""
    for name in ("min_nodes", "max_nodes", "increment"):
        ours, theirs = getattr(mine, name), getattr(there.record, name)
        if ours != theirs:
            return (
                f"this member was started with {name}={ours}, but the job has {theirs}: "
                "all members must be given the same sizes"
            )
    return ""


def close(own: MemberKey, stored: Versioned[Member], outcome: Outcome, utc_ms: int) -> Txn | None:
    """End the rendezvous for all members."""
    at = own.view.round
    if at is None or at.record.state is RoundState.CLOSED:
        return None
    closed: Round = replace(
        at.record, state=RoundState.CLOSED, ids=(), outcome=outcome, since_ms=utc_ms, save=None
    )
    key = own.view.keys.round
    return Txn(
        (
            Compare(key, Target.MOD, at.modified),
            Compare(stored.key, Target.CREATE, stored.created),
        ),
        (Put(key, encode(closed)),),
        (Range(key),),
    )


def set_aside(own: MemberKey, stored: Versioned[Member], leader: Versioned[Member]) -> Txn:
    """Replace a coordinator without its agent; it keeps its place in the round.

    Its key comes back as the youngest on the same lease, which we renew from then on.
    """
    record = replace(leader.record, session=leader.record.session + ASIDE)
    key = own.view.keys.session(record.id, record.session)
    return Txn(
        (
            Compare(leader.key, Target.MOD, leader.modified),
            Compare(stored.key, Target.CREATE, stored.created),
        ),
        (Delete(leader.key), Put(key, encode(record), record.lease), *own.required_ranges),
        own.required_ranges,
    )


def depose(own: MemberKey, stored: Versioned[Member], leader: Versioned[Member]) -> Txn:
    """Delete the key of a coordinator that is proven gone, and read which session is first then."""
    return Txn(
        (
            Compare(leader.key, Target.MOD, leader.modified),
            Compare(stored.key, Target.CREATE, stored.created),
        ),
        (Delete(leader.key), *own.required_ranges),
        own.required_ranges,
    )
