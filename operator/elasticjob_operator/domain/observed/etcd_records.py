"""Records of one job in etcd, decoded from bytes and mapped to the rendezvous view. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elasticjob_operator.domain.observed.state import Offence, RendezvousView, StopReason
from elasticjob_operator.domain.status.rounds import final_at, utc_time
from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import (
    NAMED,
    HeldBack,
    described,
    lost_again,
)
from elasticjob_rendezvous.protocol.coordinator.scale_up import waiting_reason
from elasticjob_rendezvous.protocol.kv import KeyValue
from elasticjob_rendezvous.protocol.records import agent_reports
from elasticjob_rendezvous.protocol.records.agent_reports import AgentReport
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode, encode
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.keys import ROOT, Keys
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
    reasons_of,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, legal_size
from elasticjob_rendezvous.protocol.records.timings import History

_MACHINE_CLASSES = frozenset(
    {FailureClass.SIGNAL, FailureClass.HANG, FailureClass.HOST_OUT_OF_MEMORY}
)
"""Failure classes that a machine may have caused. A script's errors do not depend on the
machine."""
MEMBER_BYTES = 8 * 1024
"""Size that no record of a member exceeds; a larger value is not decoded at each change."""
_MOST_DIGITS = 9
"""Maximum number of digits of an incarnation."""


@dataclass(frozen=True, slots=True)
class Records:
    """Rendezvous records of one job at one revision of etcd.

    `members` holds the newest session of each member, in order of creation. `malformed` describes
    records that could not be decoded: another program may write below this prefix. `setting_up` is
    set if the agents of a torch backend report that their rendezvous does not exist yet.
    `bounds_revision` is the revision of the record of the bounds, also of a malformed one, and 0
    without one.
    """

    prefix: str
    bounds: RendezvousParams | None = None
    round: Round | None = None
    members: tuple[Member, ...] = ()
    rosters: dict[int, Roster] = field(default_factory=dict)
    histories: dict[int, History] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    dones: tuple[Done, ...] = ()
    malformed: tuple[str, ...] = ()
    setting_up: bool = False
    bounds_revision: int = 0

    @property
    def roster(self) -> Roster | None:
        """Roster of the current round; None before it is final."""
        return None if self.round is None else self.rosters.get(self.round.number)

    @property
    def joined(self) -> frozenset[str]:
        """Ids of all members on record, present or past. An agent becomes one only once its
        launcher runs."""
        seats = (seat.id for roster in self.rosters.values() for seat in roster.seats)
        failed = (failure.member for failure in self.failures)
        done = (one.member for one in self.dones)
        return frozenset((*(member.id for member in self.members), *seats, *failed, *done))


def prefix_of(key: str) -> str:
    """Return the prefix of the job that a key belongs to; empty if it belongs to none."""
    parts = key.removeprefix(ROOT).split("/", 3)
    if not key.startswith(ROOT) or len(parts) < 4:
        return ""
    return ROOT + "/".join(parts[:3]) + "/"


def folder_of(prefix: str) -> str:
    """Return the folder of all incarnations of the job that a prefix belongs to."""
    return ROOT + "/".join(prefix.removeprefix(ROOT).split("/", 2)[:2]) + "/"


def job_of(prefix: str) -> tuple[str, str, int] | None:
    """Return namespace, uid and incarnation of a prefix; None if it is not a job's."""
    parts = prefix.removeprefix(ROOT).split("/")
    if not prefix.startswith(ROOT) or len(parts) != 4:
        return None
    return (parts[0], parts[1], int(parts[2])) if is_incarnation(parts[2]) else None


def is_incarnation(text: str) -> bool:
    """Return True if this is the number of an incarnation; a stranger may write any text."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def decode_records(prefix: str, kvs: Iterable[KeyValue]) -> Records:
    """Decode the records below `prefix`; malformed ones are listed and left out."""
    keys = Keys(prefix)
    reading = _Decoder()
    for kv in sorted(kvs, key=lambda kv: kv.create_revision):
        try:
            reading.take(keys.parts(kv.key), kv)
        except MalformedRecord as error:
            reading.malformed.append(str(error))
    return Records(
        prefix=prefix,
        bounds=reading.bounds,
        bounds_revision=reading.bounds_revision,
        round=reading.round,
        members=tuple(reading.members.values()),
        rosters=reading.rosters,
        histories=reading.histories,
        failures=tuple(reading.failures),
        dones=tuple(reading.dones),
        malformed=tuple(reading.malformed),
    )


def bounded_members(found: Records, pods: Set[str], most: int) -> tuple[Records, int]:
    """Return the records without those of ignored members, and the number of these members.

    All members with a pod of the job are kept. Of the members without one, whose pods are gone or
    never existed, the oldest `most` are kept.
    """
    without = [member.id for member in found.members if member.id not in pods]
    ignored = frozenset(without[most:])
    if not ignored:
        return found, 0
    members = tuple(member for member in found.members if member.id not in ignored)
    return replace(found, members=members), len(ignored)


def merge_reports(
    prefix: str, answers: Collection[AgentReport], present: Collection[str]
) -> Records:
    """Merge the reports of a job's agents; `present` are the ids of the agents that still run."""
    found = decode_records(prefix, agent_reports.merged(prefix, answers, present))
    return replace(found, setting_up=agent_reports.setting_up(answers))


@dataclass(slots=True)
class _Decoder:
    bounds: RendezvousParams | None = None
    bounds_revision: int = 0
    round: Round | None = None
    members: dict[str, Member] = field(default_factory=dict)
    rosters: dict[int, Roster] = field(default_factory=dict)
    histories: dict[int, History] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    dones: list[Done] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def take(self, parts: tuple[str, ...], kv: KeyValue) -> None:
        match parts:
            case ("bounds",):
                self.bounds_revision = kv.mod_revision
                self.bounds = decode(RendezvousParams, kv.key, kv.value)
            case ("round",):
                self.round = decode(Round, kv.key, kv.value)
            case ("members", member, _):
                # The session created last wins; records come in order of creation.
                self.members.pop(member, None)
                found = decode(Member, kv.key, kv.value)
                if found.id != member:  # one member under many keys would count as many
                    raise MalformedRecord(kv.key, "it is the record of another member")
                self.members[member] = found
            case ("roster", _):
                roster = decode(Roster, kv.key, kv.value)
                self.rosters[roster.number] = roster
            case ("history", _):
                history = decode(History, kv.key, kv.value)
                self.histories[history.number] = history
            case ("failures", _, _):
                self.failures.append(decode(Failure, kv.key, kv.value))
            case ("done", _, _):
                self.dones.append(decode(Done, kv.key, kv.value))


def closed_round(before: KeyValue | None, outcome: Outcome, utc_ms: int) -> bytes | None:
    """Return the encoded round record, closed with `outcome`; None if it is closed already.

    A malformed record is replaced: it must not keep a job from ending.
    """
    found = Round(number=1, state=RoundState.JOINABLE, cause=Cause(CauseKind.START))
    if before is not None:
        with suppress(MalformedRecord):
            found = decode(Round, before.key, before.value)
    if found.state is RoundState.CLOSED:
        return None
    closed = replace(found, state=RoundState.CLOSED, outcome=outcome, since_ms=utc_ms, save=None)
    return encode(closed)


def rendezvous_view(found: Records) -> RendezvousView:
    """Map the records to the view that plan and status use."""
    current, roster = found.round, found.roster
    waiting = sum(member.state is MemberState.WAITING for member in found.members)
    if current is None:
        return RendezvousView(members=found.members, waiting=waiting)
    sealed = current.state in (RoundState.FINAL, RoundState.CLOSED)
    return RendezvousView(
        state=_state(found, current),
        round=current.number,
        nodes=current.nodes if sealed else len(current.ids),
        waiting=waiting,
        waiting_reason=_waiting_reason(found, waiting),
        held_back=tuple(_held_back(found)),
        world_size=current.world_size if sealed else 0,
        master=(current.master_name or None) if sealed else None,
        cause=_with_reasons(current.cause),
        since=utc_time(current.since_ms),
        members=found.members,
        ranks={}
        if roster is None
        else {assignment.id: assignment.group_rank for assignment in roster.seats},
        rounds=tuple(_round(found.histories[n]) for n in sorted(found.histories)),
        failures_charged=len(current.charged),
        interruptions=current.counts,
        offences=tuple(_offences(found)),
        lost=_lost(found, current),
        first_failure=_first_failure(found, current),
        outcome=None if current.outcome is None else _with_reason(current.outcome),
    )


def _round(found: History) -> History:
    return replace(found, cause=_with_reasons(found.cause))


def _with_reasons(cause: Cause) -> Cause:
    """Return the cause with its reasons, which the previous release wrote into the detail."""
    return replace(cause, reasons=reasons_of(cause))


def _state(found: Records, current: Round) -> RendezvousState:
    if found.setting_up and current.state is RoundState.JOINABLE:
        return RendezvousState.SETUP
    return RendezvousState(current.state.value)


def _waiting_reason(found: Records, waiting: int) -> str:
    """Return the reason that keeps waiting members out of the final round, or an empty text."""
    current, bounds = found.round, found.bounds
    if current is None or bounds is None or current.state is not RoundState.FINAL:
        return ""
    held = tuple(_held_back(found))
    reasons = []
    if legal_size(bounds, current.nodes + waiting) > current.nodes:
        reasons += [each.text for each in held[:NAMED]]
        reasons += [f"and {len(held) - NAMED} more nodes"] if len(held) > NAMED else []
    reasons.append(waiting_reason(bounds, current.nodes, waiting, current.save))
    return "; ".join(filter(None, reasons))


def _held_back(found: Records) -> Iterator[HeldBack]:
    """Yield the waiting members that were lost again, while a round is final."""
    current, bounds = found.round, found.bounds
    if current is None or bounds is None or current.state is not RoundState.FINAL:
        return
    waiting = {member.id for member in found.members if member.state is MemberState.WAITING}
    for row in lost_again(current, found.roster):
        if row.member in waiting:
            yield described(row, bounds)


def _lost(found: Records, current: Round) -> dict[tuple[int, str], str]:
    """Return the ids of lost members by the round in which they were lost and their name."""
    causes = {number: history.cause for number, history in found.histories.items()}
    lost = {}
    for number, cause in (causes | {current.number: current.cause}).items():
        before = max((n for n in found.rosters if n < number), default=None)
        if cause.kind is not CauseKind.LOSS or before is None:
            continue
        for seat in found.rosters[before].seats:
            if seat.name in cause.members:
                lost[before, seat.name] = seat.id
    return lost


def _offences(found: Records) -> Iterator[Offence]:
    """Yield the offences of machines: lost nodes, and worker failures not caused by the script."""
    for number, history in sorted(found.histories.items()):
        before = max((n for n in found.rosters if n < number), default=None)
        at = final_at(history)
        if before is None or at is None:
            continue
        if history.cause.kind is CauseKind.LOSS:
            seats = {assignment.name: assignment for assignment in found.rosters[before].seats}
            for name in history.cause.members:
                if name in seats and seats[name].node:
                    yield Offence(seats[name].node, at, FailureClass.NODE_LOST.value)
        elif history.cause.kind is CauseKind.FAILURE:
            culprit = failure_policy.culprit(f for f in found.failures if f.round == before)
            if culprit is not None and culprit.node and culprit.kind in _MACHINE_CLASSES:
                yield Offence(culprit.node, at, culprit.kind.value)


_REASONS = {reason.value: reason for reason in StopReason}


def outcome_record(kind: OutcomeKind, reason: StopReason, message: str = "") -> Outcome:
    """Return the record of an end that the operator decides.

    Its detail repeats the reason for readers of the previous release.
    """
    detail = f"{reason}: {message}" if message else reason.value
    return Outcome(kind, detail, reason=reason.value)


def _with_reason(outcome: Outcome) -> Outcome:
    """Return the outcome with the operator's reason apart from the detail; without one, if the
    operator did not close the rendezvous."""
    word, _, message = outcome.detail.partition(": ")
    stopped = outcome.kind is OutcomeKind.STOPPED
    # The previous release wrote the reason only as the first word of the detail.
    reason = _REASONS.get(outcome.reason or word) if stopped else None
    if reason is None:
        return replace(outcome, reason="")
    detail = message if word == reason.value else outcome.detail
    return replace(outcome, detail=detail, reason=reason.value)


def is_progress_only(before: KeyValue | None, after: KeyValue) -> bool:
    """Return True if only the training progress of a member changed, which is not urgent."""
    if (
        before is None
        or max(len(before.value), len(after.value)) > MEMBER_BYTES
        or b'"step":' not in after.value
        or before.create_revision != (after.create_revision)
    ):
        return False
    try:
        old, new = decode(Member, after.key, before.value), decode(Member, after.key, after.value)
    except MalformedRecord:
        return False
    unchanged = replace(
        old, step=new.step, checkpoint_step=new.checkpoint_step, busy_ms=new.busy_ms
    )
    if _snapshot_health(old) == _snapshot_health(new):
        unchanged = replace(unchanged, snapshots=new.snapshots)
    return unchanged == new


def _snapshot_health(member: Member) -> tuple[object, ...]:
    """Return the part of a member's snapshots whose change is urgent: not their steps."""
    found = member.snapshots
    if found is None:
        return ()
    held = found.replicated >= 0, found.step >= 0
    return found.trouble, found.storage_error, found.replicas, *held


def _first_failure(found: Records, current: Round) -> Failure | None:
    """Return the culprit of the latest failure, or of the failure that ended the job.

    An effect of a node's loss or leave is not a failure: it is never charged.
    """
    by_round: dict[int, list[Failure]] = {}
    for failure in found.failures:
        by_round.setdefault(failure.round, []).append(failure)
    blamed = current.outcome.culprit if current.outcome is not None else ""
    counted = set(current.charged)
    if not blamed:
        counted |= {n for n in by_round if failure_policy.includes_cause(by_round[n])}
    latest = max(counted & by_round.keys(), default=None)
    return None if latest is None else failure_policy.blamed(by_round[latest], blamed)
