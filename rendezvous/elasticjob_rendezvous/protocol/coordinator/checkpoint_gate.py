"""Checkpoint of the whole gang before the planned end of a final round or of the job. No I/O.

First all members are asked (`Round.save`), and each reports the last save point that its script
passed. From then on no worker passes another one, so the save point after the highest report is
ahead of every rank: all save there, in the same call, so that saving may use collectives. A loss or
a failure ends the wait, as does a gang whose workers all report that the save failed. Members that
can only keep their state in memory are asked before the end of a round, not before that of the job.

A member that goes while the round still restores may have the only copy of a snapshot in its
memory. The round then goes on until all members have restored and saved a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.round_end import RoundEnd
from elasticjob_rendezvous.protocol.records.closing_checkpoint import (
    NAMED_MEMBERS,
    SaveReport,
    SaveResult,
)
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Restore,
    Round,
    Save,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.replica import View

STOP_MARGIN_SECONDS = 5.0
"""Part of a leaving member's time that is reserved for stopping its workers."""
UNHURRIED_SECONDS = 60.0
"""Maximum duration of a checkpoint if no node must leave."""
ASK_SECONDS = 2.0
"""Maximum time for which a leaving member's workers continue without a request to save."""
LEAVES = frozenset({CauseKind.LEAVE, CauseKind.PREEMPTION})


def before_end(
    view: View,
    roster: Roster,
    current: Round,
    bounds: RendezvousParams,
    judgement: RoundEnd,
    timers: Timers,
    *,
    ends_job: bool = False,
) -> Save | RoundEnd | None:
    """Return the request to save, the end of the round, or None for neither.

    A gang that got the request is stopped in any case, since a rank may have saved and wait for the
    stop: without a cause in `judgement` the round ends for the cause of the request. The time
    counts from the latest write of the request, as etcd may have refused an earlier one. There is
    no request unless every member can and wants to save.
    """
    if judgement.cause is not None and judgement.cause.kills:
        return judgement
    done = view.dones_of(roster.number)
    gang, whole = _gang(view, roster)
    save = current.save
    if save is None:
        if judgement.cause is None:
            timers.forget(("restore", roster.number))
            timers.forget(("restored", roster.number))
            return None
        timers.since(("planned end", roster.number))
        able = bool(gang) and whole and _can_save(gang, ends_job)
        seconds = save_seconds(judgement.cause, bounds)
        must_restore = whole and not (able or ends_job) and _must_restore(gang, judgement.cause)
        if must_restore and not timers.over(("restore", roster.number), seconds):
            return None
        timers.start(("save", roster.number), timers.now)
        seconds -= _restored_for(roster, timers)
        return Save(judgement.cause, seconds) if able and seconds > 0 else judgement
    over = timers.over(("save", roster.number), save.seconds)
    if whole and not over and save.point == 0:
        return replace(save, point=_point(gang)) if _all_answered(gang) else None
    if whole and not over and not _have_saved(gang) and not _have_failed(gang):
        return None
    if judgement.cause is not None:
        return judgement
    if done:
        return None  # the script has finished: a newcomer stops no worker any more
    return RoundEnd(cause=save.cause, symptom=timers.known(("planned end", roster.number)))


def end_of_job(closing: ClosingRequest, judgement: RoundEnd) -> RoundEnd:
    """Return the end of a round whose job is to be closed: `judgement` if it kills the workers."""
    if judgement.cause is not None and judgement.cause.kills:
        return judgement
    cause = cause_with_reasons(CauseKind.LEAVE, (), (closing.outcome.reason,))
    return RoundEnd(cause=cause, symptom=judgement.symptom)


def awaits_member(view: View, roster: Roster, leavers: Container[str]) -> bool:
    """Return True if a member without a key may register again, for example after an outage."""
    done = view.dones_of(roster.number)
    return any(
        assignment.id not in done
        and assignment.id not in leavers
        and view.member(assignment.id) is None
        for assignment in roster.seats
    )


def save_report(view: View, roster: Roster, current: Round, end: RoundEnd) -> SaveReport:
    """Return the report on the save before the end of the job, at the time of that end."""
    assert end.cause is not None
    gang, whole = _gang(view, roster)
    done, number = view.dones_of(roster.number), roster.number
    found = {assignment.name: view.member(assignment.id) for assignment in roster.seats}
    there = [one.record for one in found.values() if one is not None and one.record.round == number]
    # A request before the end of the round may be answered by snapshots in memory alone.
    supported = all(member.saves for member in gang)
    requested = current.save is not None and supported
    ready = {member.id for member in gang if (member.saved if requested else member.saves)}
    if requested and (any(member.completed for member in gang) or (whole and _have_saved(gang))):
        result, ready = SaveResult.SAVED, {assignment.id for assignment in roster.seats}
    elif end.cause.kills or (current.save is not None and not whole):
        result = SaveResult.INTERRUPTED
    elif requested:
        result = SaveResult.TIMED_OUT
    elif not gang or not whole:
        result, ready = SaveResult.NOT_TRAINING, {assignment.id for assignment in roster.seats}
    else:
        result = SaveResult.NO_TIME if supported else SaveResult.NOT_SUPPORTED
    unsaved = [
        assignment.name
        for assignment in roster.seats
        if assignment.id not in ready and assignment.id not in done
    ]
    return SaveReport(
        result,
        max((member.step for member in there), default=-1),
        max((member.checkpoint_step for member in there), default=-1),
        tuple(unsaved[:NAMED_MEMBERS]),
        save_error(gang) if result is SaveResult.TIMED_OUT else "",
    )


def save_error(gang: Iterable[Member]) -> str:
    """Return the error of the requested checkpoint that a member reports; empty for none."""
    return next((member.save_error for member in gang if member.save_error), "")


def save_seconds(cause: Cause, bounds: RendezvousParams) -> float:
    """Return the time that a gang has for its checkpoint; 0 or less: no request."""
    if cause.kind in LEAVES:
        return bounds.leave_seconds - STOP_MARGIN_SECONDS
    return UNHURRIED_SECONDS


def _can_save(gang: list[Member], ends_job: bool) -> bool:
    """Return True if all members save, or all keep their state, in memory that some outlive."""
    stays = not ends_job and any(member.state is not MemberState.LEAVING for member in gang)
    return all(member.saves for member in gang) or (stays and all(each.keeps for each in gang))


def _must_restore(gang: list[Member], cause: Cause) -> bool:
    """Return True if members that go may have snapshots that those that stay do not have yet.

    Not asked for a gang that can save: its next save point comes after the restore.
    Members of which nothing is known count once one that goes has saved a step: theirs follow.
    """
    names = cause.members
    if cause.kind is CauseKind.SCALE_DOWN:
        going = gang  # the members that will be missing are not chosen yet
    elif cause.kind in LEAVES:
        going = [each for each in gang if each.state is MemberState.LEAVING or each.name in names]
        if len(going) == len(gang):
            return False  # nothing in memory outlives them
    else:
        return False
    if any(member.restore is Restore.PENDING for member in going):
        return True
    has_saved = any(member.restore is Restore.DONE for member in going)
    return has_saved and any(member.restore is not Restore.DONE for member in gang)


def _restored_for(roster: Roster, timers: Timers) -> float:
    """Return the seconds for which the end of the round has waited for the members to restore."""
    since = timers.known(("restore", roster.number))
    return 0.0 if since is None else timers.since(("restored", roster.number)) - since


def _gang(view: View, roster: Roster) -> tuple[list[Member], bool]:
    """Return the members that train and are not done, and True if those are all that must."""
    done = view.dones_of(roster.number)
    pending = [assignment.id for assignment in roster.seats if assignment.id not in done]
    members = [_training(view, id, roster.number) for id in pending]
    gang = [member for member in members if member is not None]
    return gang, len(gang) == len(members)


def _training(view: View, id: str, number: int) -> Member | None:
    """Return the member, if its workers of this round run."""
    versioned = view.member(id)
    if versioned is None or versioned.record.round != number or versioned.record.stopped:
        return None
    runs = versioned.record.state in (MemberState.RUNNING, MemberState.LEAVING)
    return versioned.record if runs else None


def _all_answered(gang: Iterable[Member]) -> bool:
    return all(member.passed >= 0 for member in gang)


def _have_saved(gang: list[Member]) -> bool:
    """Return True if the gang has saved; one report of a complete checkpoint counts for all."""
    return any(member.completed for member in gang) or all(member.saved for member in gang)


def _have_failed(gang: list[Member]) -> bool:
    """Return True if no member can save any more: all workers report that their save failed."""
    return bool(gang) and all(member.save_error for member in gang)


def _point(gang: Iterable[Member]) -> int:
    """Return the first save point that no rank has passed."""
    return 1 + max((member.passed for member in gang), default=0)
