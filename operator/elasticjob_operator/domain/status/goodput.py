"""Goodput of a run: share of its time spent on steps that were not lost later. No I/O.

A run begins with the job's start or resumption, so a suspension is not part of it. Its time counts
from its first step to its end. Repeated steps, recoveries, rounds without a first step and waits
for nodes are lost time. See docs/decisions/0058 and 0072.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from elasticjob_operator.domain.observed.state import RendezvousView
from elasticjob_operator.domain.status.rounds import (
    PLANNED_CAUSES,
    began_at,
    recovery_ms,
)
from elasticjob_operator.model.status import RoundStatus, SnapshotsStatus
from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.records.members import Member, MemberState

_MOST = 2**63 - 1
"""Maximum of a total: that of the schema."""
_RESOLUTION = timedelta(seconds=1)
"""Resolution of times in the status."""


def with_lost_steps(
    rounds: Sequence[RoundStatus], view: RendezvousView, before: SnapshotsStatus | None
) -> list[RoundStatus]:
    """Return the rounds; add to the current one the lost steps that no record has.

    After the loss of all nodes, and after a resumption, only the status `before` has the last step.
    It comes from a report, which may be older than that step, so the number of lost steps is a
    minimum. It is computed once, at the first report of the round, which has the restored step.
    Lost steps in the records of rounds in between are subtracted.
    """
    reached = None if before is None else before.reached_step
    began = _began_step(view)
    if before is None or reached is None or began is None:
        return list(rounds)
    if before.reached_round == view.round or not _is_of_last_round(before, view.round):
        return list(rounds)
    unseen = (round_ for round_ in rounds if before.counted_round < round_.round < view.round)
    recorded = sum(
        max(0, round_.lost_steps or 0) for round_ in unseen if round_.first_step_ms is not None
    )
    lost = {"lost_steps": max(0, reached - began - recorded)}
    return [
        found.model_copy(update=lost)
        if found.round == view.round
        and found.first_step_ms is not None
        and found.lost_steps is None
        else found
        for found in rounds
    ]


def _is_of_last_round(before: SnapshotsStatus, current: int) -> bool:
    """Return True if the last counted round is that of `reached_step`, or the current one."""
    return before.counted_round in (before.reached_round, current)


def with_reached(after: SnapshotsStatus, view: RendezvousView, program: str) -> SnapshotsStatus:
    """Return the status with the newest step of the last counted round, and its restored step.

    Without a report of that round, for example between rounds, both are unchanged. The restored
    step may be reported seconds before the first step. `program` is the digest of the job's
    program. The one at the first report is kept, because a suspension may come with an edit.
    """
    if after.counted_round != view.round:
        return after
    is_known = after.reached_round == view.round
    began = _began_step(view)
    known = (
        after.reached_step,
        began,
        *(member.step for member in _current(view) if member.step >= 0),
    )
    steps = [step for step in (known if is_known else known[1:]) if step is not None]
    if not steps:
        return after
    began = after.began_step if began is None and is_known else began
    return after.model_copy(
        update={
            "reached_step": max(steps),
            "began_step": began,
            "reached_round": view.round,
            "program": after.program if is_known else program,
        }
    )


def of_this_round(
    before: SnapshotsStatus | None, known: Sequence[RoundStatus], rounds: Sequence[RoundStatus]
) -> SnapshotsStatus | None:
    """Return the status; reset the counted round if another round has its number now.

    A job that was suspended and resumed while the operator did not run numbers its rounds from one
    again. It is another round if it became final after the first step of the `known` one.
    """
    if before is None:
        return None
    number = before.counted_round
    counted = next((one for one in known if one.round == number), None)
    current = next((round_ for round_ in rounds if round_.round == number), None)
    stepped = None if counted is None else _first_step_at(counted)
    final = None if current is None else current.final_time
    if stepped is None or final is None or final <= stepped:
        return before
    return before.model_copy(update={"counted_round": 0, "reached_round": 0})


def carried_over(former: SnapshotsStatus | None, program: str) -> SnapshotsStatus | None:
    """Return the status of snapshots at the start of a run: the newest step of the previous run.

    None if that step is of another program, whose steps are not comparable.
    """
    if former is None or former.reached_step is None or former.program != program:
        return None
    return SnapshotsStatus(reached_step=former.reached_step, program=program)


def is_carried_over(found: SnapshotsStatus) -> bool:
    """Return True if the status has only the step of a former run."""
    return found == SnapshotsStatus(reached_step=found.reached_step, program=found.program)


def _began_step(view: RendezvousView) -> int | None:
    """Return the step with which the current round began; None if unknown."""
    restored = [
        member.snapshots.restored for member in _current(view) if member.snapshots is not None
    ]
    return max((step for step in restored if step >= 0), default=None)


def _current(view: RendezvousView) -> list[Member]:
    """Return the members whose workers are of the current round."""
    return [member for member in view.members if member.round == view.round]


def with_rounds(
    before: SnapshotsStatus,
    rounds: Sequence[RoundStatus],
    known: Sequence[RoundStatus],
    view: RendezvousView,
    now: datetime,
) -> SnapshotsStatus:
    """Return the totals with the rounds that have a first step since, and the goodput at `now`.

    The totals follow from the records of the rounds. Only the loss of all nodes at once has no
    record: its time is that of the first observation. `known` are the rounds as they were counted:
    the lost steps of the last one may become known later.
    """
    # Lower numbers without a new run: etcd lost the rounds.
    last = before.counted_round if before.counted_round <= view.round else 0
    lost_steps, lost_ms, paused_ms = before.lost_steps, before.lost_ms, before.paused_ms
    since, seen = before.since, before.paused_since
    began: datetime | None = None
    for found in rounds:
        if found.round == last:
            steps, ms = _late(found, known)
            lost_steps, lost_ms = max(0, lost_steps + steps), lost_ms + ms
        if found.round <= last:
            continue
        if since is not None:
            began = min(filter(None, (began, _pause_began(found))), default=None)
        if found.first_step_ms is None:
            continue
        stepped = _first_step_at(found)
        if since is None:
            since = stepped
        else:
            paused_ms += _pause_ms(_earlier(seen, began), stepped, found)
        lost_steps += max(0, found.lost_steps or 0)
        if found.lost_ms is not None:
            lost_ms += max(0, found.lost_ms)
        elif before.since is not None and last == before.counted_round:
            lost_ms += _estimated_ms(before, rounds, found, _earlier(seen, began))
        seen, began, last = None, None, found.round
    paused_since = _earlier(seen, began)
    if since is None or (_trains(view) and last == view.round):
        paused_since = None
    elif not _trains(view) and view.state is not RendezvousState.CLOSED:  # the end is not a pause
        is_open = view.state is not RendezvousState.FINAL and view.since is not None
        paused_since = paused_since or (view.since if is_open else now)
    after = before.model_copy(
        update={
            "lost_steps": min(lost_steps, _MOST),
            "lost_ms": min(lost_ms, _MOST),
            "paused_ms": min(paused_ms, _MOST),
            "counted_round": last,
            "since": _whole(since),
            "paused_since": _whole(paused_since),
        }
    )
    return after.model_copy(update={"goodput_percent": _percent(after, _end(view, now))})


def _late(found: RoundStatus, known: Sequence[RoundStatus]) -> tuple[int, int]:
    """Return the lost steps of a counted round, and their time, that became known since then.

    A time that was estimated is not replaced.
    """
    counted = next((one for one in known if one.round == found.round), None)
    if counted is None or found.lost_steps is None or not is_same_round(found, counted):
        return 0, 0
    steps = max(0, found.lost_steps) - max(0, counted.lost_steps or 0)
    return steps, max(0, found.lost_ms or 0) if counted.lost_steps is None else 0


def is_same_round(one: RoundStatus, other: RoundStatus) -> bool:
    """Return True if two entries of one number were final at the same time."""
    at, other_at = one.final_time, other.final_time
    return at is not None and other_at is not None and _whole(at) == _whole(other_at)


def _estimated_ms(
    before: SnapshotsStatus,
    rounds: Sequence[RoundStatus],
    found: RoundStatus,
    ended: datetime | None,
) -> int:
    """Return the time of the steps that a round repeats; 0 if its times are unknown.

    Steps of the previous counted round take their share of its time, from its first step to
    `ended`: all of it if this round restored nothing newer than the step at which that one began.
    Steps before that round take the mean time of the run's kept steps, counted from step 0, which
    is a minimum. The sum never exceeds the time of the run without its losses.
    """
    counted = (round_ for round_ in rounds if round_.round == before.counted_round)
    stepped = next(map(_first_step_at, counted), None)
    since, reached, began = before.since, before.reached_step, before.began_step
    lost = max(0, found.lost_steps or 0)
    if since is None or stepped is None or ended is None or reached is None or began is None:
        return 0
    if before.reached_round != before.counted_round or not lost:
        return 0
    # Its first step is at the begin of the time.
    steps = max(1, reached - began - 1)
    spent = _milliseconds(stepped, ended) * min(lost, steps) // steps
    earlier = max(0, lost - max(0, reached - began))
    counted_out = before.paused_ms + before.lost_ms
    if earlier:
        kept = max(0, _milliseconds(since, stepped) - counted_out)
        spent += kept * min(earlier, began) // max(1, began)
    return min(spent, max(0, _milliseconds(since, ended) - counted_out))


def _percent(found: SnapshotsStatus, end: datetime) -> int | None:
    """Return the goodput, rounded down; None before the first step."""
    if found.since is None or end <= found.since:
        return None
    elapsed = _milliseconds(found.since, end)
    lost = found.lost_ms + found.paused_ms
    if found.paused_since is not None:
        lost += _milliseconds(found.paused_since, end)
    return 100 * max(0, elapsed - lost) // max(1, elapsed)


def _end(view: RendezvousView, now: datetime) -> datetime:
    """Return the time up to which the run is measured: its end, or `now`."""
    if view.state is RendezvousState.CLOSED and view.since is not None:
        return view.since
    return now


def _trains(view: RendezvousView) -> bool:
    """Return True if a member of the final round runs its workers, or is done."""
    return view.state is RendezvousState.FINAL and any(
        member.round == view.round and (member.runs or member.state is MemberState.DONE)
        for member in view.members
    )


def _pause_began(found: RoundStatus) -> datetime | None:
    """Return the end of the training before a round; None if unknown.

    Until the decision for a planned change training continues.
    """
    if found.final_time is None:
        return None
    is_planned = found.cause in PLANNED_CAUSES
    return began_at(
        found.final_time, found.model_copy(update={"detect_ms": 0}) if is_planned else found
    )


def _first_step_at(found: RoundStatus) -> datetime | None:
    """Return the time of the first step of the slowest worker; None if unknown."""
    if found.final_time is None or found.first_step_ms is None:
        return None
    try:
        spent = timedelta(milliseconds=(found.start_ms or 0) + found.first_step_ms)
        return found.final_time + spent
    except OverflowError:  # a hostile record
        return None


def _pause_ms(began: datetime | None, stepped: datetime | None, found: RoundStatus) -> int:
    """Return the duration of a pause; without its times the sum of the round's phases."""
    if began is None or stepped is None:
        return max(0, (recovery_ms(found) or 0) + (found.first_step_ms or 0))
    return _milliseconds(began, stepped)


def _earlier(seen: datetime | None, recorded: datetime | None) -> datetime | None:
    """Return the start of a pause: that of the records, unless one was seen clearly before it."""
    if seen is None or recorded is None:
        return seen or recorded
    return recorded if recorded - seen <= _RESOLUTION else seen


def _milliseconds(begin: datetime, end: datetime) -> int:
    """Return the time between two moments, of different clocks; 0 if it is negative."""
    return max(0, round((end - begin) / timedelta(milliseconds=1)))


def _whole(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(microsecond=0)
