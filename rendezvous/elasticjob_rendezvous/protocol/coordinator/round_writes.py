"""Writes of a round: one transaction each, its record of times and cost, and the deletion of old
rounds and failures. No I/O.

`records.timings` measures the phases; only the coordinator writes the record: at the seal of the
round, completed and corrected later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import failure_policy
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Op, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records import timings
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import Cause, Member, Round, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.replica import Versioned, View

DELETES_PER_TXN = 50
"""Maximum deletions in one transaction; leaves room for its other operations."""


@dataclass(frozen=True, slots=True)
class RoundUpdate:
    """Transaction with the log line that explains it."""

    txn: Txn
    note: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot that a coordinator decides on: everything known at one moment.

    `own` is the coordinator's own key, `bounds` the rendezvous parameters in force.
    """

    view: View
    own: Versioned[Member]
    bounds: RendezvousParams
    clock: Clock

    @property
    def current(self) -> Round:
        """Current round; requires that one exists."""
        assert self.view.round is not None
        return self.view.round.record


def held(own: Versioned[Member]) -> Compare:
    """Return the condition that the coordinator's session still exists."""
    return Compare(own.key, Target.CREATE, own.created)


def write_round(
    snapshot: Snapshot,
    new: Round,
    note: str,
    ops: tuple[Op, ...] = (),
    compares: tuple[Compare, ...] = (),
) -> RoundUpdate:
    """Return the write of the round, and of everything that must become true together with it."""
    view, own, keys = snapshot.view, snapshot.own, snapshot.view.keys
    revision = view.round.modified if view.round else 0
    others = [m for m in view.members().values() if m.key != own.key]
    moved = view.round is None or (new.number, new.state) != _place(view.round.record)
    second = min(others, key=lambda member: member.created, default=None)
    record = replace(
        new,
        coordinator=own.record.id,
        successor=second.record.id if second else "",
        since_ms=snapshot.clock.utc_ms if moved else new.since_ms,
        save=new.save if new.state is RoundState.FINAL else None,
        fenced=() if new.state is RoundState.FINAL else new.fenced,
    )
    return RoundUpdate(
        Txn(
            (Compare(keys.round, Target.MOD, revision), held(own), *compares),
            (Put(keys.round, encode(record)), *ops),
            (
                Range(keys.round),
                Range(keys.sessions(own.record.id), prefix=True),
                *(Range(compare.key) for compare in compares),
            ),
        ),
        note,
    )


def _place(current: Round) -> tuple[int, RoundState]:
    return current.number, current.state


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
    progress = "all workers started" if known.first_step_ms is None else "all workers stepped"
    compares = (Compare(history.key, Target.MOD, history.modified), held(snapshot.own))
    return RoundUpdate(
        Txn(compares, (Put(history.key, encode(known)),), (Range(history.key),)),
        f"round {roster.number} runs: {progress}",
    )


def corrected_cause(history: Versioned[History] | None, cause: Cause) -> tuple[Put, ...]:
    """Return the write of the round's corrected cause; nothing where it has no record yet."""
    if history is None:
        return ()
    return (Put(history.key, encode(replace(history.record, cause=cause))),)


KEPT_ROUNDS = 10
"""Number of rounds whose roster, history, failures and successes stay in etcd."""


def outdated(view: View, number: int) -> list[Delete]:
    """Return the deletions of rounds too old to be kept once round `number` is sealed.

    At most as many as one write holds: the next seals delete the rest.
    """
    keys, last = view.keys, number - KEPT_ROUNDS
    found = [
        *(Delete(keys.roster(old)) for old in view.rosters if old <= last),
        *(Delete(keys.history(old)) for old in view.histories if old <= last),
        *(Delete(keys.failures(old), prefix=True) for old in view.failures if old <= last),
        *(Delete(keys.dones(old), prefix=True) for old in view.dones if old <= last),
    ]
    return found[:DELETES_PER_TXN]


def surplus(view: View) -> tuple[Delete, ...]:
    """Return the deletions of failures beyond those kept per round, as many as one write holds."""
    found = (
        Delete(view.keys.failure(number, member))
        for number, failures in view.failures.items()
        for member in failure_policy.surplus(failures)
    )
    return tuple(islice(found, DELETES_PER_TXN))


def clear_surplus(snapshot: Snapshot) -> RoundUpdate | None:
    """Delete the surplus, some at a time."""
    deletes = surplus(snapshot.view)
    if not deletes:
        return None
    note = f"{len(deletes)} failures deleted: over the limit per round"
    return RoundUpdate(Txn((held(snapshot.own),), deletes, ()), note)
