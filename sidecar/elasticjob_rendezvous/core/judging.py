"""Later judgement of ended rounds: failures charged or excused, leaves found to be preemptions.

`verdicts`, `excuses` and `counts` hold the rules; this module applies them when they are due and
writes the result. No I/O.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core import crashes, verdicts
from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.closing import close, outcome_of_charge
from elasticjob_rendezvous.core.counts import counted, told_of_preemption
from elasticjob_rendezvous.core.excuses import excuse
from elasticjob_rendezvous.core.histories import corrected
from elasticjob_rendezvous.core.peers import Peers
from elasticjob_rendezvous.core.records import Cause, CauseKind, RoundState
from elasticjob_rendezvous.core.timers import Timers
from elasticjob_rendezvous.core.view import View


def pass_verdicts(scene: Scene, peers: Peers, timers: Timers) -> Act | None:
    """Charge or excuse a round whose failure awaits its verdict."""
    current = scene.current
    if current.state is RoundState.CLOSED:
        return None
    for number in current.pending:
        if not verdicts.speaks_for_itself(scene.view.failures_of(number).values()):
            reason = excuse(scene.view, scene.view.rosters.get(number), scene.bounds)
            if reason is not None:
                return _excuse(scene, number, reason)
            if not _verdict_is_due(scene, number, peers, timers):
                continue
        return _charge(scene, number, timers)
    return None


def _excuse(scene: Scene, number: int, reason: Cause) -> Act:
    """Excuse a round's failure; a next round that began for the failure gets the real cause."""
    current = scene.current
    cause = current.cause
    if cause.kind is CauseKind.FAILURE and current.number == number + 1:
        cause = reason
    counts = counted(current.counts, reason.kind)
    pending = _without(current.pending, number)
    excused = replace(current, pending=pending, cause=cause, counts=counts)
    gone = ", ".join(reason.members[:3])
    note = f"round {number}: failure not charged: {gone} was lost or left"
    ops = corrected(scene.view.histories.get(current.number), cause)
    return write_round(scene, excused, note, ops)


def _charge(scene: Scene, number: int, timers: Timers) -> Act:
    current = scene.current
    failures = scene.view.failures_of(number).values()
    streak = crashes.after_failure(current.streak, failures, crashes.lived(number, timers))
    cause = current.cause
    if cause.kind is CauseKind.FAILURE and current.previous == number:
        cause = crashes.explained(crashes.put_right(current, failures), streak)
    charges = (*current.charged, number)
    pending = _without(current.pending, number)
    charged = replace(current, pending=pending, charged=charges, streak=streak, cause=cause)
    if outcome := outcome_of_charge(scene, charges, streak, number):
        return close(scene, outcome, charged)
    return write_round(scene, charged, f"round {number}: failure charged")


def _without(pending: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(other for other in pending if other != number)


def _verdict_is_due(scene: Scene, number: int, peers: Peers, timers: Timers) -> bool:
    """Return True if nothing can explain a failure any more.

    The wait is twice as long while a member of that round answers nothing, since its lease decides
    whether it is lost, and while a member has not reported the end of its workers, since it may be
    about to report its own failure or leave.
    """
    window = verdicts.window_seconds(scene.bounds)
    if not timers.over(("verdict", number), window):
        return False
    roster = scene.view.rosters.get(number)
    seats = roster.seats if roster else ()
    silent = any(peers.silent(seat.id) and not peers.alive(seat.id, timers.now) for seat in seats)
    if not silent and not _some_have_yet_to_tell(scene.view, number):
        return True
    return timers.over(("verdict", number), 2 * window)


def _some_have_yet_to_tell(view: View, number: int) -> bool:
    """Return True if a member's last report is older than the end of its workers of that round."""
    found = (view.member(seat.id) for seat in view.undone(number))
    records = [member.record for member in found if member is not None]
    return any(
        record.round < number or (record.runs and record.round == number) for record in records
    )


def learn_of_preemption(scene: Scene) -> Act | None:
    """Turn a leave into a preemption if the operator's report comes after the member's own."""
    current = scene.current
    ended = scene.view.rosters.get(current.number - 1)
    if current.state is RoundState.CLOSED or ended is None:
        return None
    told = told_of_preemption(current.cause, current.counts, ended.seats, scene.bounds)
    if told is None:
        return None
    cause, counts = told
    known = replace(current, cause=cause, counts=counts)
    note = f"round {current.number}: {', '.join(cause.members[:3])} was preempted"
    ops = corrected(scene.view.histories.get(current.number), cause)
    return write_round(scene, known, note, ops)
