"""Recovery after etcd lost its data: no round number is used twice. No I/O.

The coordinator restores the round if no member has seen a newer one; else the next round takes a
number above all that members have seen.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator.cause_counts import counted
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    write_round,
)
from elasticjob_rendezvous.protocol.kv import Put
from elasticjob_rendezvous.protocol.liveness import member_loss
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import Roster

LOST = "data lost"


def restore(
    snapshot: Snapshot, timers: Timers, last: tuple[Round, Roster] | None
) -> RoundUpdate | None:
    """Restore the lost round from memory (`last`), or open a newer one if the memory is older."""
    known = snapshot.view.known()
    if not timers.over(LOST, snapshot.bounds.keep_alive_seconds):
        return None  # let the others register again: they may know a higher number
    if last and last[0].number == known:
        round_, roster = last
        sealed = encode(roster)
        ops = (Put(snapshot.view.keys.roster(known), sealed), Put(snapshot.view.keys.seats, sealed))
        judged = replace(round_, pending=())  # the failures to judge are lost
        return write_round(snapshot, judged, f"round {known} restored", ops)
    cause = Cause(CauseKind.DATA_LOST, (), "etcd lost its data")
    again = Round(known + 1, RoundState.JOINABLE, cause, previous=known)
    return write_round(snapshot, again, f"round {known + 1} opens: data lost")


def overtake(snapshot: Snapshot, timers: Timers) -> RoundUpdate | None:
    """Open a round above all known numbers if a member already used this number or a higher one."""
    current = snapshot.current
    if current.state is RoundState.CLOSED:
        return None
    members = [versioned.record for versioned in snapshot.view.members().values()]
    used = [member.round for member in members if _used_before(snapshot, member)]
    top = max([snapshot.view.known(), *used])
    if top <= current.number and not used:
        return None
    timers.forget(LOST)  # late members need the full time to register
    number = max(top, current.number) + 1
    cause = Cause(CauseKind.DATA_LOST, (), f"members know of round {top}")
    ended = current.state is RoundState.FINAL
    again = replace(
        current,
        number=number,
        state=RoundState.JOINABLE,
        ids=(),
        cause=cause,
        previous=number - 1,
        counts=counted(current.counts, cause.kind) if ended else current.counts,
    )
    return write_round(snapshot, again, f"round {number} opens: {cause.detail}")


def may_register(snapshot: Snapshot, timers: Timers, opened: float) -> bool:
    """Return True if members of a round that etcd lost may still register, or stop their workers.

    Nobody can be probed, because the roster is unknown. But a member that outlived etcd finds
    its lease gone, once etcd is reachable, and then has little time to register.
    """
    current = snapshot.current
    lost = current.cause.kind is CauseKind.DATA_LOST
    if not lost or current.previous in snapshot.view.rosters:
        return False
    since = timers.known(LOST)
    patience = member_loss.patience_seconds(snapshot.bounds)
    return not timers.passed((opened if since is None else since) + patience)


def _used_before(snapshot: Snapshot, member: Member) -> bool:
    """Return True if `member` ran a different round with the current number or a higher one."""
    current = snapshot.current
    if member.round < current.number:
        return False
    if current.state in (RoundState.JOINABLE, RoundState.FROZEN):
        return True
    roster = snapshot.view.rosters.get(current.number)
    return member.runs and roster is not None and roster.assignment(member.id) is None
