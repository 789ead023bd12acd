"""Record of a round's cost by phase, and the rules for when each phase is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob_rendezvous.protocol.records.codec import prepare
from elasticjob_rendezvous.protocol.records.members import Cause, Member, MemberState


@dataclass(frozen=True, slots=True)
class History:
    """Cost of a round in milliseconds of its coordinator's clock; None is unknown.

    detect: first symptom to decision; stop: decision to the last worker stopped;
    join: to `frozen`; confirm: to `final`; start: `final` to all workers started;
    first_step: from there to the first step of the slowest worker, where workers report steps;
    backoff: delay after a failure, part of none of the other phases.
    cold_nodes: number of nodes with cold-started workers; None if no agent reports it.
    cold_reason: reason of the cold start that took longest.
    lost_steps: completed steps that this round repeats: the number that a worker reports, else the
        minimum by the last step of each node; None before the first step, and if unknown.
    lost_ms: duration of these steps; None if no worker reports it.
    lost_reason: reason for which the last of them was not copied at the stop; empty if unknown.
    """

    number: int
    cause: Cause
    nodes: int
    final_ms: int = 0
    detect_ms: int | None = None
    stop_ms: int | None = None
    join_ms: int | None = None
    start_ms: int | None = None
    confirm_ms: int | None = None
    first_step_ms: int | None = None
    backoff_ms: int | None = None
    cold_nodes: int | None = None
    cold_reason: str = ""
    lost_steps: int | None = None
    lost_ms: int | None = None
    lost_reason: str = ""


def spent_ms(begin: float | None, end: float | None) -> int | None:
    """Return the milliseconds between two moments of one clock; None if either was not seen."""
    return None if begin is None or end is None else round((end - begin) * 1000)


def after_start(history: History, roster: Iterable[Member | None]) -> History:
    """Return the history of a final round, extended by the start times that its members report.

    A phase is known once every member has reported it. The member that starts last need not be the
    one that steps last: both are measured from `final`, so that the phases add up to the first
    step of the slowest. A known phase does not change: workers that start again later did not make
    this round more expensive.
    """
    members = list(roster)
    running = [member for member in members if member is not None and _runs(member, history)]
    if len(running) < len(members):
        return history
    if history.start_ms is None:
        history = _with_cold(history, running)
    start = _first(history.start_ms, max(member.start_ms for member in running))
    step = None
    if all(member.first_step_ms for member in running):
        step = max(member.start_ms + member.first_step_ms for member in running) - (start or 0)
        history = _with_lost(history, running)
    return replace(
        history,
        start_ms=start,
        first_step_ms=_first(history.first_step_ms, None if step is None else max(1, step)),
        lost_steps=_first(history.lost_steps, _lost_steps(running)),
    )


def _lost_steps(running: list[Member]) -> int | None:
    """Return the number of steps from the first one of this round to the last one before it.

    Known once each member that has reported steps of the latest earlier round has reported one of
    this round. The others do not count: the job may have begun again since their last step.
    """
    past = [member for member in running if member.ended_step >= 0]
    latest = max((member.ended_round for member in past), default=0)
    reporting = [member for member in past if member.ended_round == latest]
    if not reporting or any(member.step < 0 for member in reporting):
        return None
    first = min(member.step for member in running if member.step >= 0)
    return max(0, max(member.ended_step for member in reporting) + 1 - first)


def slowest(one: History, other: History) -> History:
    """Return `one` with the start and first step of the slower of two separately measured nodes."""
    start = longest(one.start_ms, other.start_ms)
    steps = [
        history.start_ms + history.first_step_ms
        for history in (one, other)
        if history.start_ms is not None and history.first_step_ms is not None
    ]
    step = max(steps) - start if len(steps) == 2 and start is not None else None
    return replace(
        one,
        start_ms=start,
        first_step_ms=None if step is None else max(1, step),
        lost_steps=longest(one.lost_steps, other.lost_steps),
        lost_ms=longest(one.lost_ms, other.lost_ms),
        lost_reason=one.lost_reason or other.lost_reason,
    )


def longest(one: int | None, other: int | None) -> int | None:
    """Return the longer of two durations; an unknown one does not count."""
    return max((ms for ms in (one, other) if ms is not None), default=None)


def _with_cold(history: History, running: list[Member]) -> History:
    reporting = [member for member in running if member.cold is not None]
    if not reporting:
        return history
    cold = [member for member in reporting if member.cold]
    slowest = max(cold, key=lambda member: member.start_ms, default=None)
    reason = slowest.cold if slowest is not None else None
    return replace(history, cold_nodes=len(cold), cold_reason=reason or "")


def _with_lost(history: History, running: list[Member]) -> History:
    """Return the history with the lost steps that a worker reports, which replace the minimum."""
    reporting = [member for member in running if member.lost_steps >= 0]
    if not reporting or history.lost_ms is not None:
        return history
    steps, ms, reason = max((row.lost_steps, row.lost_ms, row.lost_reason) for row in reporting)
    return replace(history, lost_steps=steps, lost_ms=ms, lost_reason=reason if steps else "")


def _runs(member: Member, history: History) -> bool:
    return member.state is MemberState.RUNNING and member.round == history.number


def _first(known: int | None, found: int | None) -> int | None:
    return found if known is None else known


prepare(History)
