"""Failures in a row: how long the next recovery waits, and when there is no hope. Pure.

Only charged failures count. A job that fails again soon after its start, before its first
step, waits longer each time; one that fails at the same step again and again is ended
early. What a node's loss or leave caused waits for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from elasticjob_rendezvous.core import verdicts
from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.records import Cause, CauseKind, Round, RoundState, Streak
from elasticjob_rendezvous.core.timers import Timers

SOON_SECONDS = 60.0
"""Workers that lived for longer did not fail at their start."""
LONGEST_PAUSE_SECONDS = 60.0
HOPELESS = 3
"""So many failures in a row at the same step are not going to end."""
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class Life:
    """What the coordinator saw of a final round: for how long it stood, whether a step was told."""

    seconds: float
    stepped: bool = False

    @property
    def was_long(self) -> bool:
        return self.stepped or self.seconds >= SOON_SECONDS


def lived(number: int, timers: Timers) -> Life:
    """What the coordinator saw of a final round; a new one saw less of it."""
    began = timers.known(("state", number, RoundState.FINAL))
    ended = timers.known(("state", number + 1, RoundState.JOINABLE))
    end = timers.now if ended is None else ended
    stepped = timers.known(("stepped", number)) is not None
    return Life(0.0 if began is None else end - began, stepped)


def after_failure(streak: Streak, failures: Collection[Failure], life: Life) -> Streak:
    """The streak after a round of these failures was charged.

    A new coordinator saw only the end of the round; workers know how long they ran.
    """
    ran_ms = max((failure.ran_ms or 0 for failure in failures), default=0)
    stepped = any(failure.step is not None for failure in failures)
    trained = stepped or life.was_long or ran_ms >= SOON_SECONDS * 1000
    row = 0 if trained else streak.row + 1
    first = verdicts.culprit(failures)
    if first is None or first.step is None:
        return replace(streak, row=row)
    times = streak.times + 1 if first.step == streak.step else 1
    return Streak(row, first.step, times)


def after_round(streak: Streak, life: Life) -> Streak:
    """The streak after a round that ended for another reason, or whose verdict is open."""
    return replace(streak, row=0) if life.was_long else streak


def pause_seconds(streak: Streak) -> float:
    """How long the recovery from the last failure waits: 0, 1, 2, 4, … s."""
    if streak.row < 2:
        return 0.0
    return min(2.0 ** min(streak.row - 2, 16), LONGEST_PAUSE_SECONDS)


def is_hopeless(streak: Streak) -> bool:
    """Whether the job fails at the same step again and again."""
    return streak.times >= HOPELESS


def hopeless(streak: Streak) -> str:
    """Why the job ends early, for people."""
    return f"no progress: the {_ordinal(streak.times)} failure in a row at step {streak.step}"


def explained(cause: Cause, streak: Streak) -> Cause:
    """The cause with the pause that follows it, if there is one."""
    pause = pause_seconds(streak)
    if not pause:
        return cause
    said = f"backing off {pause:g} s after the {_ordinal(streak.row)} failure in a row"
    return replace(cause, detail=f"{cause.detail}; {said}" if cause.detail else said)


def put_right(current: Round, failures: Collection[Failure]) -> Cause:
    """The cause of a round that a failure opened, now that more have told of theirs.

    Who told first need not be who failed first: peers of one that hung, or crashed, notice at
    once, and of several that fail together any may be the first to be heard.
    """
    cause, known = current.cause, verdicts.cause_of(failures)
    if known is None or not cause.kind is known.kind is CauseKind.FAILURE:
        return cause
    if known.members == cause.members:
        return cause
    return explained(known, current.streak) if current.previous in current.charged else known


def _ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"
