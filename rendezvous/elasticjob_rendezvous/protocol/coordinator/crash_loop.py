"""Crash-loop back-off: pause before the next recovery; early end without progress. Pure.

Only charged failures count. A job that fails again soon after its start, before its first step,
waits longer each time; one that fails at the same step again and again ends early. The loss or
leave of a node causes no pause.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Round,
    RoundState,
    Streak,
)

SOON_SECONDS = 60.0
"""Maximum lifetime of workers whose failure counts as a failure at the start."""
LONGEST_PAUSE_SECONDS = 60.0
MAX_FAILURES_AT_A_STEP = 3
"""Number of failures in a row at the same step that ends the job."""
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class Life:
    """Duration of a final round as observed by the coordinator, and True if a step was reported."""

    seconds: float
    stepped: bool = False

    @property
    def was_long(self) -> bool:
        return self.stepped or self.seconds >= SOON_SECONDS


def lived(number: int, timers: Timers) -> Life:
    """Return the observed life of a final round; a new coordinator has observed only its last
    part."""
    began = timers.known(("state", number, RoundState.FINAL))
    ended = timers.known(("state", number + 1, RoundState.JOINABLE))
    end = timers.now if ended is None else ended
    stepped = timers.known(("stepped", number)) is not None
    return Life(0.0 if began is None else end - began, stepped)


def after_failure(streak: Streak, failures: Collection[Failure], life: Life) -> Streak:
    """Return the streak after a round with these failures was charged.

    A new coordinator saw only the end of the round; workers report how long they ran.
    """
    ran_ms = max((failure.ran_ms or 0 for failure in failures), default=0)
    stepped = any(failure.step is not None for failure in failures)
    trained = stepped or life.was_long or ran_ms >= SOON_SECONDS * 1000
    row = 0 if trained else streak.row + 1
    first = failure_policy.culprit(failures)
    if first is None or first.step is None:
        return replace(streak, row=row)
    times = streak.times + 1 if first.step == streak.step else 1
    return Streak(row, first.step, times)


def after_round(streak: Streak, life: Life) -> Streak:
    """Return the streak after a round that ended for another reason, or is not decided yet."""
    return replace(streak, row=0) if life.was_long else streak


def pause_seconds(streak: Streak) -> float:
    """Return the pause before the recovery from the last failure: 0, 1, 2, 4, … s."""
    if streak.row < 2:
        return 0.0
    return min(2.0 ** min(streak.row - 2, 16), LONGEST_PAUSE_SECONDS)


def is_without_progress(streak: Streak) -> bool:
    """Return True if the job fails at the same step again and again."""
    return streak.times >= MAX_FAILURES_AT_A_STEP


def no_progress_text(streak: Streak) -> str:
    """Return the reason for the job's early end, for people."""
    return f"no progress: the {_ordinal(streak.times)} failure in a row at step {streak.step}"


def explained(cause: Cause, streak: Streak) -> Cause:
    """Return the cause with the pause that follows it, if there is one."""
    pause = pause_seconds(streak)
    if not pause:
        return cause
    pause_text = f"backing off {pause:g} s after the {_ordinal(streak.row)} failure in a row"
    return replace(cause, detail=f"{cause.detail}; {pause_text}" if cause.detail else pause_text)


def corrected_cause(current: Round, failures: Collection[Failure]) -> Cause:
    """Return the corrected cause of a round that a failure opened, after later failure reports.

    The first report need not come from the worker that failed first: peers of a hung or crashed
    worker notice at once, and of several that fail together any may report first.
    """
    cause, known = current.cause, failure_policy.cause_of(failures)
    if known is None or not cause.kind is known.kind is CauseKind.FAILURE:
        return cause
    if known.members == cause.members:
        return cause
    return explained(known, current.streak) if current.previous in current.charged else known


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"
