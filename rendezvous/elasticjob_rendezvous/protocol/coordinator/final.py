"""Actions of the coordinator in a final round: close, ask to save, end it, or record its start.

`round_end` judges the round, `checkpoint_gate` handles the checkpoint before a planned end. No I/O.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import (
    checkpoint_gate,
    crash_loop,
    failure_policy,
    repeated_losses,
)
from elasticjob_rendezvous.protocol.coordinator.cause_counts import counted
from elasticjob_rendezvous.protocol.coordinator.closing import close, outcome_of_charge
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_end import RoundEnd, round_end
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    clear_surplus,
    record_start,
    write_round,
)
from elasticjob_rendezvous.protocol.coordinator.scale_up import waiting_newcomers
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    Outcome,
    OutcomeKind,
    RoundState,
    Save,
)
from elasticjob_rendezvous.protocol.records.params import ClosingRequest
from elasticjob_rendezvous.protocol.records.roster import Roster


def next_act(snapshot: Snapshot, memory: Coordinator) -> RoundUpdate | None:
    """Return the action due in a final round."""
    view, current, bounds, timers = snapshot.view, snapshot.current, snapshot.bounds, memory.timers
    roster = view.rosters.get(current.number)
    if roster is None:
        return None
    waits = memory.silenced.ids(timers) | _held_back(snapshot, roster, memory)
    judgement = round_end(view, roster, bounds, memory.peers, timers, memory.leavers, waits)
    if judgement.succeeded:
        return close(snapshot, Outcome(OutcomeKind.SUCCEEDED))
    if bounds.closing is not None:
        return _save_and_close(snapshot, memory, roster, bounds.closing, judgement)
    match checkpoint_gate.before_end(view, roster, current, bounds, judgement, timers):
        case Save() as save:
            _note_detection(snapshot, memory, judgement)
            return _request_save(snapshot, save)
        case RoundEnd() as end:
            return _reopen(snapshot, memory, end)
        case None if judgement.cause is not None:
            _note_detection(snapshot, memory, judgement)
    return (
        record_start(snapshot, roster)
        or clear_surplus(snapshot)
        or _end_rows(snapshot, roster, timers)
    )


def _held_back(snapshot: Snapshot, roster: Roster, memory: Coordinator) -> frozenset[str]:
    """Return the newcomers that were lost again and do not count yet."""
    view, bounds, timers = snapshot.view, snapshot.bounds, memory.timers
    held = repeated_losses.held_back(view, snapshot.current, bounds, timers)
    if not held:
        return held
    silent = memory.silenced.ids(timers)
    new = {member.id for member in waiting_newcomers(view, roster, bounds)} - silent
    others = len(roster.seats) + len(new - held)
    if not repeated_losses.leaves_others_idle(bounds, others, len(new & held)):
        return held
    most = repeated_losses.LONGEST_SHARED_DELAY_SECONDS
    return repeated_losses.held_back(view, snapshot.current, bounds, timers, most)


def _end_rows(snapshot: Snapshot, roster: Roster, timers: Timers) -> RoundUpdate | None:
    """End the rows of losses of the members with which this round has trained."""
    current = snapshot.current
    ended = repeated_losses.rows_to_end(snapshot.view, current, roster, timers)
    if not ended:
        return None
    losses = tuple(row for row in current.losses if row.member not in ended)
    note = f"round {current.number} trains: earlier losses of its members no longer count"
    return write_round(snapshot, replace(current, losses=losses), note)


def _save_and_close(
    snapshot: Snapshot,
    memory: Coordinator,
    roster: Roster,
    closing: ClosingRequest,
    judgement: RoundEnd,
) -> RoundUpdate | None:
    """Ask the gang to save, then close the job as the operator requested.

    A failure or loss meanwhile closes it at once: the next round would ignore the request.
    """
    view, current = snapshot.view, snapshot.current
    end = checkpoint_gate.end_of_job(closing, judgement)
    unasked = judgement.cause is None and current.save is None
    if unasked and checkpoint_gate.awaits_member(view, roster, memory.leavers):
        return clear_surplus(snapshot)
    match checkpoint_gate.before_end(
        view, roster, current, snapshot.bounds, end, memory.timers, ends_job=True
    ):
        case Save() as save:
            return _request_save(snapshot, save)
        case RoundEnd() as over:
            report = checkpoint_gate.save_report(view, roster, current, over)
            return close(snapshot, replace(closing.outcome, save=report))
    return clear_surplus(snapshot)


def _note_detection(snapshot: Snapshot, memory: Coordinator, judgement: RoundEnd) -> None:
    """Record the time to the decision, once, without a restore or checkpoint that follows."""
    if judgement.symptom is not None:
        spent_ms = round((snapshot.clock.now - judgement.symptom) * 1000)
        memory.detected_ms.setdefault(snapshot.current.number + 1, spent_ms)


def _request_save(snapshot: Snapshot, save: Save) -> RoundUpdate:
    when = f"at save point {save.point}" if save.point else f"first, within {save.seconds:g} s"
    note = f"round {snapshot.current.number} will end ({save.cause.kind}): all workers save {when}"
    return write_round(snapshot, replace(snapshot.current, save=save), note)


def _reopen(snapshot: Snapshot, memory: Coordinator, judgement: RoundEnd) -> RoundUpdate:
    """Open the next round, or close the job if the charge of this end was one too many."""
    assert judgement.cause is not None
    current, members = snapshot.current, snapshot.view.members().values()
    number = current.number
    failures = snapshot.view.failures_of(number).values()
    retries = 0
    charged, pending, cause = current.charged, current.pending, judgement.cause
    counts = counted(current.counts, cause.kind)
    if any(m.record.round == number and m.record.step >= 0 for m in members):
        memory.timers.since(("stepped", number))
    life = crash_loop.lived(number, memory.timers)
    streak = crash_loop.after_round(current.streak, life)
    if cause.kind is CauseKind.MASTER_PORT:
        retries = current.port_retries + 1
    if failure_policy.includes_cause(failures) or retries > failure_policy.MASTER_PORT_RETRIES:
        charged, counts = (*charged, number), current.counts
        streak = crash_loop.after_failure(current.streak, failures, life)
        if outcome := outcome_of_charge(snapshot, charged, streak, number):
            over = replace(current, charged=charged, streak=streak)
            return close(snapshot, outcome, over)
        cause = crash_loop.explained(cause, streak)
    elif failures and cause.kind is CauseKind.FAILURE:
        pending = (*pending, number)
    roster = snapshot.view.rosters.get(number)
    registered, utc_ms = snapshot.view.members(), snapshot.clock.utc_ms
    losses = repeated_losses.after_loss(current, cause, roster, registered, utc_ms)
    cause = repeated_losses.explained(cause, losses, roster, snapshot.bounds)
    _note_detection(snapshot, memory, judgement)
    again = replace(
        current,
        number=number + 1,
        state=RoundState.JOINABLE,
        cause=cause,
        charged=charged,
        pending=pending,
        port_retries=retries,
        counts=counts,
        streak=streak,
        losses=losses,
    )
    names = ", ".join(cause.members[:3])
    return write_round(snapshot, again, f"round {number + 1} opens: {cause.kind} {names}".rstrip())
