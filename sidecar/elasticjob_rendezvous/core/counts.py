"""Counts of ended rounds by cause. Pure.

A final round that did not end with its job counts once: as a charged failure (`Round.charged`), or
here. A failure that awaits its verdict is counted by the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import assert_never

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.records import Cause, CauseKind, Counts, because, reasons_of
from elasticjob_rendezvous.core.roster import Seat


def counted(counts: Counts, kind: CauseKind) -> Counts:
    """Return the counts after a round ended for this cause; a failure counts when it is charged."""
    match kind:
        case CauseKind.LOSS:
            return replace(counts, losses=counts.losses + 1)
        case CauseKind.LEAVE:
            return replace(counts, leaves=counts.leaves + 1)
        case CauseKind.PREEMPTION:
            return replace(counts, preemptions=counts.preemptions + 1)
        case CauseKind.JOIN:
            return replace(counts, joins=counts.joins + 1)
        case CauseKind.SCALE_DOWN | CauseKind.MASTER_PORT | CauseKind.DATA_LOST:
            return replace(counts, others=counts.others + 1)
        case CauseKind.FAILURE | CauseKind.START | CauseKind.UNCONFIRMED:
            return counts
        case _:
            assert_never(kind)


def leave_cause(
    leaving: Iterable[Seat], reasons: dict[str, str], bounds: Bounds, *, urgent: bool = False
) -> Cause:
    """Return the cause of a round end by leaves: a preemption if any of the members was preempted.

    `reasons` are the members' own reasons, by id.
    """
    seats = tuple(leaving)
    marks = (bounds.marked(seat.id) for seat in seats)
    preempted = {mark.reason for mark in marks if mark is not None and mark.preempted}
    said = preempted or {_why(seat, reasons.get(seat.id, ""), bounds) for seat in seats}
    kind = CauseKind.PREEMPTION if preempted else CauseKind.LEAVE
    names = tuple(seat.name for seat in seats)
    return because(kind, names, said, urgent)


def with_later_leaves(
    cause: Cause, ended: Iterable[Seat], why: Callable[[str], str | None], bounds: Bounds
) -> Cause:
    """Return the cause of a round that a leave opened, extended by the leaves until it froze.

    `ended` are the seats of the round that the leave ended, without finished members; `why`
    returns a member's reason for leaving, or None. `told_of_preemption` handles later leaves that
    were preemptions.
    """
    if cause.kind not in (CauseKind.LEAVE, CauseKind.PREEMPTION):
        return cause
    seats = tuple(ended)
    later = {}
    for seat in seats:
        reason = why(seat.id)
        if seat.name not in cause.members and reason is not None:
            later[seat.name] = _why(seat, reason, bounds)
    if not later:
        return cause
    names = tuple(seat.name for seat in seats if seat.name in later or seat.name in cause.members)
    if cause.kind is CauseKind.PREEMPTION:
        return replace(cause, members=names)
    return because(cause.kind, names, (*reasons_of(cause), *later.values()), cause.urgent)


def told_of_preemption(
    cause: Cause, counts: Counts, ended: Iterable[Seat], bounds: Bounds
) -> tuple[Cause, Counts] | None:
    """Return cause and counts after a late report of the operator that a leave was a preemption.

    `ended` are the seats of the round that the leave ended. Return None without such a report.
    """
    if cause.kind is not CauseKind.LEAVE:
        return None
    left = [seat for seat in ended if seat.name in cause.members]
    known = leave_cause(left, {}, bounds, urgent=cause.urgent)
    if known.kind is not CauseKind.PREEMPTION:
        return None
    moved = replace(counts, leaves=counts.leaves - 1, preemptions=counts.preemptions + 1)
    return replace(known, members=cause.members), moved


def _why(seat: Seat, own_word: str, bounds: Bounds) -> str:
    """Return the reason of the member's drain request if there is one, else its own."""
    mark = bounds.marked(seat.id)
    return own_word if mark is None else mark.reason
