"""The record of what a round cost, part by part, and when each part is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elasticjob_rendezvous.core.codec import prepare
from elasticjob_rendezvous.core.records import Cause, Member, MemberState


@dataclass(frozen=True, slots=True)
class History:
    """What a round cost, in milliseconds of its coordinator's clock; None is unknown.

    detect: first symptom to decision; stop: decision to the last worker stopped;
    join: to `frozen`; confirm: to `final`; start: `final` to all workers started;
    first_step: from there to the first step of the slowest, where the workers report their steps;
    backoff: how long it was put off after a failure, which is part of none of them.
    cold_nodes: on how many nodes workers were started cold; None where nobody says.
    cold_reason: why, of that which took longest.
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


def spent_ms(begin: float | None, end: float | None) -> int | None:
    """Milliseconds between two moments of one clock; None when one of them was not seen."""
    return None if begin is None or end is None else round((end - begin) * 1000)


def after_start(history: History, roster: Iterable[Member | None]) -> History:
    """The history of a final round with what its members have said of their start by now.

    A part is known once every member has said it. The member that starts last need not be the one
    that steps last: both are measured from `final`, so that the parts add up to the first step of
    the slowest. What was known once stays: workers that are started again later did not cost this
    round more.
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
    return replace(
        history,
        start_ms=start,
        first_step_ms=_first(history.first_step_ms, None if step is None else max(1, step)),
    )


def slowest(one: History, other: History) -> History:
    """`one` with the start and the first step of the slower of two nodes, each measured alone."""
    start = longest(one.start_ms, other.start_ms)
    steps = [
        history.start_ms + history.first_step_ms
        for history in (one, other)
        if history.start_ms is not None and history.first_step_ms is not None
    ]
    step = max(steps) - start if len(steps) == 2 and start is not None else None
    return replace(one, start_ms=start, first_step_ms=None if step is None else max(1, step))


def longest(one: int | None, other: int | None) -> int | None:
    """Return the larger of two times; an unknown one does not count."""
    return max((ms for ms in (one, other) if ms is not None), default=None)


def _with_cold(history: History, running: list[Member]) -> History:
    told = [member for member in running if member.cold is not None]
    if not told:
        return history
    cold = [member for member in told if member.cold]
    slowest = max(cold, key=lambda member: member.start_ms, default=None)
    reason = slowest.cold if slowest is not None else None
    return replace(history, cold_nodes=len(cold), cold_reason=reason or "")


def _runs(member: Member, history: History) -> bool:
    return member.state is MemberState.RUNNING and member.round == history.number


def _first(known: int | None, said: int | None) -> int | None:
    return said if known is None else known


prepare(History)
