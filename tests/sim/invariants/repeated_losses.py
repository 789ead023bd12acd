"""Checks of the back-off of members that are lost again: their rows, and the delay. No writes.

The delay is implemented a second time here, on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    LossRow,
    Member,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import legal_size

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker

TRAINED_SECONDS = 60.0
KEPT_ROUNDS = 10
NEWS_SECONDS = 1.0
"""Maximum time until the coordinator knows of a registration, without a fault."""
TOLERANCE_SECONDS = 0.01


def check(checker: Checker, before: Round, after: Round) -> None:
    """Check one write of the round against the previous value."""
    if checker.world.truth.robbed:
        return
    reopened = before.state is RoundState.FINAL and after.number == before.number + 1
    if reopened and after.state is RoundState.JOINABLE and after.cause.kind is CauseKind.LOSS:
        _check_counted(checker, before, after)
    if before.state is RoundState.FROZEN and after.state is RoundState.FINAL:
        _check_newcomers(checker, before, after)
    _check_kept(checker, before, after)
    held, soon = held_back(checker, after), held_back(checker, after, 30.0)
    if before.state is not RoundState.FROZEN and after.state is RoundState.FROZEN:
        rest = len(set(after.ids) - held)
        early = (soon if _are_idle(checker, rest) else held) & set(after.ids)
        early &= {kv.key.split("/")[-2] for kv in checker.sessions()}  # not yet known to be gone
        enough = all(legal_size(bounds, rest) > 0 for bounds in checker.recent_bounds())
        checker.need(not (early and enough), "losses back off", f"{early}: {after}")
    asked = before.save is not None  # decided earlier: a gang that was asked to save is stopped
    if reopened and after.cause.kind is CauseKind.JOIN and not asked:
        present = [decode(Member, kv.key, kv.value) for kv in checker.sessions()]
        others = {member.name for member in present if member.id not in held}
        rest = before.nodes + len(others.intersection(after.cause.members))
        early = soon if _are_idle(checker, rest) else held
        names = {row.name for row in after.losses if row.member in early}
        joined = names & set(after.cause.members) - others
        checker.need(not joined, "losses back off", f"{joined} opened a round: {after}")


def _are_idle(checker: Checker, members: int) -> bool:
    """Return True if a round of these members alone leaves one of them without a rank."""
    found = checker.recent_bounds()
    return any(legal_size(each, members) < min(members, each.max_nodes) for each in found)


def held_back(checker: Checker, current: Round, longest_seconds: float = 300.0) -> set[str]:
    """Return the members that were lost again and have not been registered for their delay."""
    found = set()
    for row in current.losses:
        later = [number for number in checker.final_numbers if number > row.round]
        admitted = any(checker.sealed[number].assignment(row.member) for number in later)
        if row.times < 2 or admitted:
            continue
        lease = min(bounds.keep_alive_seconds for bounds in checker.recent_bounds())
        delay = min(longest_seconds, lease * 2.0 ** (row.times - 2))
        if checker.registered_seconds(row.member) < delay - TOLERANCE_SECONDS:
            found.add(row.member)
    return found


def _check_counted(checker: Checker, before: Round, after: Round) -> None:
    """Check that each loss lengthens the row of its member, unless most of the gang is lost."""
    roster = checker.sealed.get(before.number)
    seats = () if roster is None else roster.seats
    lost = [seat for seat in seats if seat.name in after.cause.members]
    counts = 2 * len(lost) <= len(seats)
    old = {row.member: row for row in before.losses}
    new = {row.member: row.times for row in after.losses}
    for seat in lost:
        row = old.get(seat.id)
        known = row is not None and row.session == seat.session.rstrip("~")
        times = (0 if row is None else row.times) + (counts and not known)
        detail = f"{seat.id}: {old} became {new}"
        checker.need(new.get(seat.id, 0) == times, "losses are counted", detail)


def _check_newcomers(checker: Checker, before: Round, after: Round) -> None:
    """Check that a seal counts losses of absent members alone, for which the round opened."""
    old = {row.member: row.times for row in before.losses}
    grown = [row for row in after.losses if row.times > old.get(row.member, 0)]
    names = after.cause.members if after.cause.kind is CauseKind.JOIN else ()
    for row in grown:
        came = checker.registered_seconds(row.member) < NEWS_SECONDS or checker.is_disturbed()
        one = row.times == old.get(row.member, 0) + 1
        real = row.name in names and came and one
        checker.need(real, "losses are counted", f"{row} at the seal of {after}")


def _check_kept(checker: Checker, before: Round, after: Round) -> None:
    """Check that no row ends before a round has trained with its member, or while it is present."""
    ended = {row.member for row in before.losses} - {row.member for row in after.losses}
    if after.number > before.number or after.pending != before.pending:
        ended -= {row.member for row in before.losses if _is_old(checker, row, before.number)}
    if not ended:
        return
    roster = checker.sealed.get(after.number)
    seated = {seat.id for seat in roster.seats} if roster is not None else set()
    lasted = checker.world.now - checker.sealed_at.get(after.number, checker.world.now)
    trained = after.state is RoundState.FINAL and lasted >= TRAINED_SECONDS and ended <= seated
    checker.need(trained, "losses are counted", f"the rows of {ended} ended: {after}")


def _is_old(checker: Checker, row: LossRow, number: int) -> bool:
    """Return True if the row may end at the end of round `number`: its member did not return."""
    absent = checker.registered_seconds(row.member) < NEWS_SECONDS or checker.is_disturbed()
    return number - row.round > KEPT_ROUNDS and absent
