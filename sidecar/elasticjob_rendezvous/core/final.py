"""Actions of the coordinator in a final round: close, ask to save, end it, or record its start.

`ending` judges the round, `saving` handles the checkpoint before a planned end. No I/O.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core import crashes, saving, verdicts
from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.closing import close, outcome_of_charge
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.counts import counted
from elasticjob_rendezvous.core.ending import FinalLook, look_at_final
from elasticjob_rendezvous.core.histories import record_start
from elasticjob_rendezvous.core.records import CauseKind, Outcome, OutcomeKind, RoundState, Save
from elasticjob_rendezvous.core.retention import clear_surplus


def next_act(scene: Scene, memory: Coordinator) -> Act | None:
    """Return the action due in a final round."""
    view, current, bounds, timers = scene.view, scene.current, scene.bounds, memory.timers
    roster = view.rosters.get(current.number)
    if roster is None:
        return None
    silent = memory.silenced.ids(timers)
    look = look_at_final(view, roster, bounds, memory.peers, timers, memory.leavers, silent)
    if look.succeeded:
        return close(scene, Outcome(OutcomeKind.SUCCEEDED))
    match saving.before_end(view, roster, current, bounds, look, timers):
        case Save() as save:
            _note_detection(scene, memory, look)
            return _ask_to_save(scene, save)
        case FinalLook() as end:
            return _reopen(scene, memory, end)
    return record_start(scene, roster) or clear_surplus(scene)


def _note_detection(scene: Scene, memory: Coordinator, look: FinalLook) -> None:
    """Note the duration of the decision, once: a checkpoint that follows is no part of it."""
    if look.symptom is not None:
        spent_ms = round((scene.clock.now - look.symptom) * 1000)
        memory.detected_ms.setdefault(scene.current.number + 1, spent_ms)


def _ask_to_save(scene: Scene, save: Save) -> Act:
    what = f"at save point {save.point}" if save.point else f"first, within {save.seconds:g} s"
    note = f"round {scene.current.number} will end ({save.cause.kind}): all workers save {what}"
    return write_round(scene, replace(scene.current, save=save), note)


def _reopen(scene: Scene, memory: Coordinator, look: FinalLook) -> Act:
    """Open the next round, or close the job if the charge of this end was one too many."""
    assert look.cause is not None
    current, members = scene.current, scene.view.members().values()
    number = current.number
    failures = scene.view.failures_of(number).values()
    retries = 0
    charged, pending, cause = current.charged, current.pending, look.cause
    counts = counted(current.counts, cause.kind)
    if any(m.record.round == number and m.record.step >= 0 for m in members):
        memory.timers.since(("stepped", number))
    life = crashes.lived(number, memory.timers)
    streak = crashes.after_round(current.streak, life)
    if cause.kind is CauseKind.MASTER_PORT:
        retries = current.port_retries + 1
    if verdicts.speaks_for_itself(failures) or retries > verdicts.MASTER_PORT_RETRIES:
        charged, counts = (*charged, number), current.counts
        streak = crashes.after_failure(current.streak, failures, life)
        if outcome := outcome_of_charge(scene, charged, streak, number):
            over = replace(current, charged=charged, streak=streak)
            return close(scene, outcome, over)
        cause = crashes.explained(cause, streak)
    elif failures and cause.kind is CauseKind.FAILURE:
        pending = (*pending, number)
    _note_detection(scene, memory, look)
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
    )
    who = ", ".join(cause.members[:3])
    return write_round(scene, again, f"round {number + 1} opens: {cause.kind} {who}".rstrip())
