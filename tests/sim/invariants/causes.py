"""Checks of a round record's history: causes, counts, first failures, seats. No writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.coordinator.round_writes import KEPT_ROUNDS
from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    Member,
    MemberState,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.invariants import repeated_losses

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker
    from tests.sim.processes.pod import Pod

COUNTERS = {
    CauseKind.LOSS: "losses",
    CauseKind.LEAVE: "leaves",
    CauseKind.PREEMPTION: "preemptions",
    CauseKind.JOIN: "joins",
    CauseKind.SCALE_DOWN: "others",
    CauseKind.MASTER_PORT: "others",
    CauseKind.DATA_LOST: "others",
}
IN_FLIGHT_SECONDS = 0.1
TRAINS = (Workers.STARTING, Workers.RUNNING)
NEWS_SECONDS = 1.0
"""Age after which every member has received news, unless a fault is active."""


def check(checker: Checker, before: Round, after: Round) -> None:
    """Check one write of the round against the previous value."""
    _check_coordinator(checker, after)
    charged = after.charged
    checker.need(len(set(charged)) == len(charged), "charges", f"one is charged twice: {charged}")
    reopened = before.state is RoundState.FINAL and after.number == before.number + 1
    if reopened and after.state is RoundState.JOINABLE:
        _check_counter(checker, before, after)
        if after.cause.kind is CauseKind.LOSS:
            _check_loss(checker, before, after)
        elif after.cause.kind in (CauseKind.LEAVE, CauseKind.PREEMPTION):
            _check_leave(checker, after)
    froze = before.state is not RoundState.FROZEN and after.state is RoundState.FROZEN
    if froze and after.number == before.number:
        _check_culprit(checker, after)
        _check_survivors(checker, after)


def _check_coordinator(checker: Checker, after: Round) -> None:
    """Check that the successor is another member, or empty for a lone coordinator."""
    alone = after.successor != after.coordinator or not after.coordinator
    checker.need(alone, "succession", f"{after.coordinator} is to succeed itself: {after}")
    others = {kv.key.split("/")[-2] for kv in _old(checker, checker.sessions())}
    # The operator may have closed the job: it names nobody, and nobody is needed any more.
    closed = after.state is RoundState.CLOSED
    named = closed or after.successor or others <= {after.coordinator}
    checker.need(
        bool(named) or checker.is_disturbed(), "succession", f"nobody of {others}: {after}"
    )


def _check_counter(checker: Checker, before: Round, after: Round) -> None:
    """Check that the counter of the cause grows by one."""
    name = COUNTERS.get(after.cause.kind)
    grew = after.charged != before.charged
    if name is None or grew or checker.world.truth.robbed:
        return
    more = getattr(after.counts, name) - getattr(before.counts, name)
    checker.need(more == 1, "counts", f"{name} grew by {more}: {after.cause}")


def _seated(checker: Checker, number: int, names: tuple[str, ...]) -> list[Pod]:
    roster = checker.sealed.get(number)
    ids = (
        {assignment.id for assignment in roster.seats if assignment.name in names}
        if roster
        else set()
    )
    return [pod for pod in checker.world.pods if pod.id in ids]


def _check_loss(checker: Checker, before: Round, after: Round) -> None:
    """Check that lost members are lost: their workers ended, or had no agent for long."""
    world = checker.world
    if checker.is_disturbed() or world.plan.rates or world.truth.robbed:
        return
    for pod in _seated(checker, before.number, after.cause.members):
        trains = pod.alive and pod.round == before.number and pod.phase in TRAINS
        # A returned agent may begin with the round while the decision is on its way to etcd.
        began = pod.phase is Workers.STARTING and world.now - pod.agent_since < IN_FLIGHT_SECONDS
        if not trains or pod.leaving or (began and pod.agents > 1):
            continue
        gone_at = world.truth.agents_gone.get(pod.id, world.now)
        away = world.now - gone_at >= world.plan.orphan_seconds
        checker.need(away, "losses are real", f"{pod.name} trains: {after.cause}")


def _check_leave(checker: Checker, after: Round) -> None:
    """Check that leavers were told to leave, or announced their leave."""
    marked = {mark.member for bounds in checker.recent_bounds() for mark in bounds.marks}
    for pod in _seated(checker, after.previous, after.cause.members):
        left = bool(pod.leaving) or pod.id in marked
        checker.need(left, "leaves are real", f"{pod.name} does not leave: {after.cause}")


def _check_culprit(checker: Checker, after: Round) -> None:
    """Check that the culprit is the reported failure nearest to the cause, if all are old."""
    if after.cause.kind is not CauseKind.FAILURE or checker.is_disturbed():
        return
    found = checker.world.etcd.range(
        Range(checker.world.keys.failures(after.previous), prefix=True)
    ).kvs
    roster = checker.sealed.get(after.previous)
    if roster is None or len(_old(checker, found)) != len(found):
        return
    failures = [decode(Failure, kv.key, kv.value) for kv in found]
    first = failure_policy.culprit([each for each in failures if roster.assignment(each.member)])
    blamed = first is None or first.name in after.cause.members
    checker.need(blamed, "culprits", f"{first} caused what is said of {after.cause}")


def _check_survivors(checker: Checker, after: Round) -> None:
    """Check that no newcomer gets the seat of a waiting member of the last round."""
    roster = checker.sealed.get(after.previous)
    if roster is None or checker.is_disturbed() or checker.world.plan.rates:
        return
    seated = {assignment.id for assignment in roster.seats}
    new = [id for id in after.ids if id not in seated]
    waiting = _waiting(checker, after.previous)
    held = repeated_losses.held_back(checker, after)
    passed = sorted(seated & waiting - set(after.ids) - checker.unheard - held)
    checker.need(not (new and passed), "survivors first", f"{new} before {passed}")


def _waiting(checker: Checker, previous: int) -> set[str]:
    """Return the members that have waited long enough to be known and are not marked to leave."""
    marked = {mark.member for bounds in checker.recent_bounds() for mark in bounds.marks}
    found = set()
    for kv in _old(checker, checker.sessions()):
        try:
            member = decode(Member, kv.key, kv.value)
        except MalformedRecord:
            continue
        if member.state is MemberState.WAITING and member.round >= previous:
            found.add(member.id)
    return found - marked


def _old(checker: Checker, kvs: tuple[KeyValue, ...]) -> list[KeyValue]:
    """Return the entries that were written a while ago."""
    written, now = checker.written_at, checker.world.now
    return [kv for kv in kvs if now - written.get(kv.mod_revision, now) > NEWS_SECONDS]


def check_sealed(checker: Checker, current: Round, roster: Roster) -> None:
    """Check that a roster matches its members' records at the time of sealing."""
    keys, etcd = checker.world.keys, checker.world.etcd
    first = roster.seats[0]
    checker.need(roster.master_address == first.address, "roster is true", f"master of {roster}")
    checker.need(roster.restarts == len(current.charged), "roster is true", f"{roster}: {current}")
    total = sum(assignment.slots for assignment in roster.seats)
    checker.need(roster.world_size == total, "roster is true", f"{total} slots in {roster}")
    by_role: dict[str, int] = {}
    for assignment in roster.seats:
        at = by_role.get(assignment.role, 0)
        checker.need(
            assignment.role_base_rank == at, "roster is true", f"{assignment} begins at {at}"
        )
        by_role[assignment.role] = at + assignment.slots
    for assignment in roster.seats:
        size = by_role[assignment.role]
        checker.need(
            assignment.role_world_size == size, "roster is true", f"{assignment} of {size}"
        )
        stored = etcd.get(keys.session(assignment.id, assignment.session))
        if stored is None:
            continue  # left while it was sealed
        member = decode(Member, stored.key, stored.value)
        told = (member.name, member.address, member.slots, member.agent_port, member.launcher_port)
        same = told == (
            assignment.name,
            assignment.address,
            assignment.slots,
            assignment.agent_port,
            assignment.launcher_port,
        )
        checker.need(same, "roster is true", f"{assignment} is not {member}")
    told_nodes = (current.nodes, current.world_size, current.master_address, current.master_port)
    sealed = (len(roster.seats), roster.world_size, roster.master_address, roster.master_port)
    checker.need(told_nodes == sealed, "roster is true", f"{current} does not tell of {roster}")


def check_kept(checker: Checker, number: int) -> None:
    """Check that records of old rounds are removed once another round is sealed."""
    world = checker.world
    if world.truth.robbed or checker.is_disturbed():
        return
    for folder in ("roster", "history", "failures", "done"):
        for kv in world.etcd.range(Range(f"{world.keys.prefix}{folder}/", prefix=True)).kvs:
            parts = world.keys.parts(kv.key)
            old = len(parts) > 1 and int(parts[1]) <= number - KEPT_ROUNDS
            checker.need(not old, "old rounds go", f"{kv.key} is there in round {number}")
