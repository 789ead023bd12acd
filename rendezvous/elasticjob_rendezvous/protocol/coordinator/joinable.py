"""Actions of the coordinator in a joinable round: wait for old workers, then freeze. No I/O.

No member is asked before all workers of the last round have stopped; a member whose workers do not
stop in time is fenced. `quorum` decides when to ask, and which members.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.coordinator import (
    crash_loop,
    data_loss,
    quorum,
    repeated_losses,
)
from elasticjob_rendezvous.protocol.coordinator.cause_counts import with_later_leaves
from elasticjob_rendezvous.protocol.coordinator.closing import close
from elasticjob_rendezvous.protocol.coordinator.fencing import fence_late
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    RoundUpdate,
    Snapshot,
    write_round,
)
from elasticjob_rendezvous.protocol.liveness import member_loss
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind, Round, RoundState
from elasticjob_rendezvous.protocol.records.roster import Roster, legal_size


def next_act(snapshot: Snapshot, memory: Coordinator) -> RoundUpdate | None:
    """Return the action due in a joinable round."""
    current, bounds, timers = snapshot.current, snapshot.bounds, memory.timers
    roster = snapshot.view.rosters.get(current.previous)
    count = _count(snapshot, memory, roster)
    opened = ("state", current.number, current.state)
    if count.unstopped:
        patience = bounds.stop_grace_seconds + bounds.confirm_seconds
        return _fence(snapshot, count) if timers.over(opened, patience) else None
    if _still_writing(snapshot, memory, timers.since(opened)):
        return None
    timers.since(("stopped", current.number))
    if _backs_off(current, timers):
        return None
    call = ("last call", current.number)
    enough = legal_size(bounds, len(count.waiting)) > 0
    if not enough:
        timers.forget(call)
    called = enough and timers.over(call, bounds.last_call_seconds)
    choice = quorum.choose(count, bounds, current.previous, called)
    if isinstance(choice, quorum.Wait):
        memory.awaited = max(0, bounds.wanted - count.held - len(count.waiting))
        return _join_timeout(snapshot, timers, choice)
    return _freeze(snapshot, choice)


def _count(snapshot: Snapshot, memory: Coordinator, roster: Roster | None) -> quorum.Quorum:
    silent, bounds = memory.silenced.ids(memory.timers), snapshot.bounds
    count = _count_eligible(snapshot, memory, roster, silent)
    if silent and legal_size(bounds, len(count.waiting)) == 0:
        # No round is possible without them: they may be asked again.
        return _count_eligible(snapshot, memory, roster, ())
    return count


def _count_eligible(
    snapshot: Snapshot, memory: Coordinator, roster: Roster | None, silent: Collection[str]
) -> quorum.Quorum:
    """Count the members that are neither silent nor held back after repeated losses.

    If no round is possible without them, members held back count too, least losses first.
    """
    view, current, bounds = snapshot.view, snapshot.current, snapshot.bounds
    members, previous = view.members(), current.previous
    last = held = repeated_losses.held_back(view, current, bounds, memory.timers)
    count = quorum.group_members(members, previous, roster, bounds, silent, held)
    if legal_size(bounds, len(count.waiting)) == 0:
        # No round is possible without them: idle workers cost more than another loss.
        for id in repeated_losses.by_losses(current, held):
            held -= {id}
            count = quorum.group_members(members, previous, roster, bounds, silent, held)
            if legal_size(bounds, len(count.waiting)) > 0:
                break
    elif repeated_losses.leaves_others_idle(bounds, len(count.waiting), count.held):
        most = repeated_losses.LONGEST_SHARED_DELAY_SECONDS
        rest = repeated_losses.held_back(view, current, bounds, memory.timers, most)
        count = quorum.group_members(members, previous, roster, bounds, silent, rest)
    return replace(count, last=last)


def _fence(snapshot: Snapshot, count: quorum.Quorum) -> RoundUpdate | None:
    """Fence members whose workers did not stop in time; the coordinator cannot fence itself."""
    members = snapshot.view.members()
    late = [members[member.id] for member in count.unstopped]
    late = [member for member in late if member.key != snapshot.own.key]
    return fence_late(snapshot, late) if late else None


def _still_writing(snapshot: Snapshot, memory: Coordinator, opened: float) -> bool:
    """Return True if workers of the last roster may run although their member's key is gone."""
    view, peers = snapshot.view, memory.peers
    if peers.orphaned or data_loss.may_register(snapshot, memory.timers, opened):
        return True
    members = view.members()
    seats = view.undone(snapshot.current.previous)
    for assignment in seats:
        if assignment.id in members:
            member_loss.returned(assignment, memory.timers)
    roster = view.rosters.get(snapshot.current.previous)
    gang = [seat.id for seat in roster.seats] if roster else []
    # A previous coordinator that trained alone had no links to rely on.
    outside = gang != [peers.leader] and all(
        assignment.id != snapshot.own.record.id for assignment in seats
    )
    absent = [assignment for assignment in seats if assignment.id not in members]
    check = member_loss.StopCheck(view, snapshot.bounds, peers, memory.timers, opened, outside)
    # Evaluate all, not only the first: each sets its own alarm.
    stopped = [check.has_stopped(assignment) for assignment in absent]
    return not all(stopped)


def _backs_off(current: Round, timers: Timers) -> bool:
    """Return True while crash-loop back-off delays the recovery from a failure."""
    if current.previous not in current.charged:
        return False
    pause = crash_loop.pause_seconds(current.streak)
    over = timers.over(("pause", current.previous), pause)
    if over and pause:
        timers.since(("paused", current.number))
    return not over


def _join_timeout(snapshot: Snapshot, timers: Timers, wait: quorum.Wait) -> RoundUpdate | None:
    """Close the job on a join timeout, which restarts while too few members can come."""
    bounds = snapshot.bounds
    can_come = bounds.expected is None or bounds.expected >= bounds.min_nodes
    if not can_come:
        timers.forget("join")
        return None
    if not timers.over("join", bounds.join_timeout_seconds):
        return None
    detail = f"no round within {bounds.join_timeout_seconds:g} s: {wait.reason}"
    return close(snapshot, Outcome(OutcomeKind.TIMED_OUT, detail))


def _freeze(snapshot: Snapshot, choice: quorum.Freeze) -> RoundUpdate:
    """Ask the chosen members to confirm."""
    current, view = snapshot.current, snapshot.view
    cause = crash_loop.corrected_cause(current, view.failures_of(current.previous).values())
    undone = view.undone(current.previous)
    cause = with_later_leaves(cause, undone, view.leaves, snapshot.bounds)
    frozen = replace(current, state=RoundState.FROZEN, ids=choice.ids, cause=cause)
    note = f"round {current.number} is frozen with {len(choice.ids)} members"
    return write_round(snapshot, frozen, note)
