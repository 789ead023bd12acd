"""Writes of the record of a round's cost: at its seal, completed and corrected later. Pure.

`timings` measures the phases; only the coordinator writes the record.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate, Snapshot, held
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records import timings
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import Cause, Round, RoundState
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.replica import Versioned


def at_seal(
    current: Round, roster: Roster, timers: Timers, detect_ms: int | None, clock: Clock
) -> History:
    """Return the part of the record that is known when round `current` is sealed."""
    opened = timers.known(("state", current.number, RoundState.JOINABLE))
    halted = timers.known(("stopped", current.number))
    paused = timers.known(("paused", current.number))
    ready = halted if paused is None else paused
    frozen = timers.known(("state", current.number, RoundState.FROZEN))
    return History(
        number=current.number,
        cause=current.cause,
        nodes=len(roster.seats),
        final_ms=clock.utc_ms,
        detect_ms=detect_ms,
        stop_ms=timings.spent_ms(opened, halted),
        backoff_ms=timings.spent_ms(halted, paused),
        join_ms=timings.spent_ms(ready, frozen),
        confirm_ms=timings.spent_ms(frozen, clock.now),
    )


def record_start(snapshot: Snapshot, roster: Roster) -> RoundUpdate | None:
    """Write the durations of the start and of the first step, once all members reported them."""
    history = snapshot.view.histories.get(roster.number)
    if history is None or history.record.first_step_ms is not None:
        return None
    found = (snapshot.view.member(assignment.id) for assignment in roster.seats)
    known = timings.after_start(history.record, (m.record if m else None for m in found))
    if known == history.record:
        return None
    what = "all workers started" if known.first_step_ms is None else "all workers stepped"
    compares = (Compare(history.key, Target.MOD, history.modified), held(snapshot.own))
    return RoundUpdate(
        Txn(compares, (Put(history.key, encode(known)),), (Range(history.key),)),
        f"round {roster.number} runs: {what}",
    )


def corrected(history: Versioned[History] | None, cause: Cause) -> tuple[Put, ...]:
    """Return the write of the round's corrected cause; nothing where it has no record yet."""
    if history is None:
        return ()
    return (Put(history.key, encode(replace(history.record, cause=cause))),)
