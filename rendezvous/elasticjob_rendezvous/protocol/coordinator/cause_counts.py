"""Counts of ended rounds by cause. Pure.

A final round that did not end with its job counts once: as a charged failure (`Round.charged`), or
here. A failure that may still be charged is counted by that decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import assert_never

from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    cause_with_reasons,
    reasons_of,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment


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
    leaving: Iterable[RankAssignment],
    reasons: dict[str, str],
    bounds: RendezvousParams,
    *,
    urgent: bool = False,
) -> Cause:
    """Return the cause of a round end by leaves: a preemption if any of the members was preempted.

    `reasons` are the members' own reasons, by id.
    """
    seats = tuple(leaving)
    marks = (bounds.marked(assignment.id) for assignment in seats)
    preempted = {
        drain_request.reason
        for drain_request in marks
        if drain_request is not None and drain_request.preempted
    }
    given = preempted or {
        _reason(assignment, reasons.get(assignment.id, ""), bounds) for assignment in seats
    }
    kind = CauseKind.PREEMPTION if preempted else CauseKind.LEAVE
    names = tuple(assignment.name for assignment in seats)
    return cause_with_reasons(kind, names, given, urgent)


def with_later_leaves(
    cause: Cause,
    ended: Iterable[RankAssignment],
    reason_of: Callable[[str], str | None],
    bounds: RendezvousParams,
) -> Cause:
    """Return the cause of a round that a leave opened, extended by the leaves until it froze.

    `ended` are the rank assignments of the round that the leave ended, without finished members;
    `reason_of` returns a member's reason for leaving, or None. `with_late_preemption` handles later
    leaves that were preemptions.
    """
    if cause.kind not in (CauseKind.LEAVE, CauseKind.PREEMPTION):
        return cause
    seats = tuple(ended)
    later = {}
    for assignment in seats:
        reason = reason_of(assignment.id)
        if assignment.name not in cause.members and reason is not None:
            later[assignment.name] = _reason(assignment, reason, bounds)
    if not later:
        return cause
    names = tuple(
        assignment.name
        for assignment in seats
        if assignment.name in later or assignment.name in cause.members
    )
    if cause.kind is CauseKind.PREEMPTION:
        return replace(cause, members=names)
    return cause_with_reasons(
        cause.kind, names, (*reasons_of(cause), *later.values()), cause.urgent
    )


def with_late_preemption(
    cause: Cause, counts: Counts, ended: Iterable[RankAssignment], bounds: RendezvousParams
) -> tuple[Cause, Counts] | None:
    """Return cause and counts after a late report of the operator that a leave was a preemption.

    `ended` are the rank assignments of the round that the leave ended. Return None without such a
    report.
    """
    if cause.kind is not CauseKind.LEAVE:
        return None
    left = [assignment for assignment in ended if assignment.name in cause.members]
    known = leave_cause(left, {}, bounds, urgent=cause.urgent)
    if known.kind is not CauseKind.PREEMPTION:
        return None
    moved = replace(counts, leaves=counts.leaves - 1, preemptions=counts.preemptions + 1)
    return replace(known, members=cause.members), moved


def _reason(assignment: RankAssignment, own_reason: str, bounds: RendezvousParams) -> str:
    """Return the reason of the member's drain request if there is one, else its own."""
    drain_request = bounds.marked(assignment.id)
    return own_reason if drain_request is None else drain_request.reason
