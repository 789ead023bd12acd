"""Actions of the coordinator in a joinable round: wait for old workers, then freeze. No I/O.

No member is asked before all workers of the last round have stopped; a member whose workers do not
stop in time is fenced. `census` decides when to ask, and which members.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core import absence, census, crashes, dataloss
from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.closing import close
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.counts import with_later_leaves
from elasticjob_rendezvous.core.fencing import fence_late
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind, Round, RoundState
from elasticjob_rendezvous.core.roster import Roster, legal_size
from elasticjob_rendezvous.core.timers import Timers


def next_act(scene: Scene, memory: Coordinator) -> Act | None:
    """Return the action due in a joinable round."""
    current, bounds, timers = scene.current, scene.bounds, memory.timers
    roster = scene.view.rosters.get(current.previous)
    count = _count(scene, memory, roster)
    opened = ("state", current.number, current.state)
    if count.unstopped:
        patience = bounds.stop_grace_seconds + bounds.confirm_seconds
        return _fence(scene, count) if timers.over(opened, patience) else None
    if _still_writing(scene, memory, timers.since(opened)):
        return None
    timers.since(("stopped", current.number))
    if _backs_off(current, timers):
        return None
    call = ("last call", current.number)
    enough = legal_size(bounds, len(count.waiting)) > 0
    if not enough:
        timers.forget(call)
    called = enough and timers.over(call, bounds.last_call_seconds)
    choice = census.choose(count, bounds, current.previous, called)
    if isinstance(choice, census.Wait):
        memory.awaited = max(0, bounds.wanted - len(count.waiting))
        return _join_timeout(scene, timers, choice)
    return _freeze(scene, choice)


def _count(scene: Scene, memory: Coordinator, roster: Roster | None) -> census.Census:
    members, previous, bounds = scene.view.members(), scene.current.previous, scene.bounds
    silent = memory.silenced.ids(memory.timers)
    count = census.take(members, previous, roster, bounds, silent)
    if silent and legal_size(bounds, len(count.waiting)) == 0:
        # No round is possible without them: they may be asked again.
        count = census.take(members, previous, roster, bounds, ())
    return count


def _fence(scene: Scene, count: census.Census) -> Act | None:
    """Fence members whose workers did not stop in time; the coordinator cannot fence itself."""
    members = scene.view.members()
    late = [members[member.id] for member in count.unstopped]
    late = [member for member in late if member.key != scene.own.key]
    return fence_late(scene, late) if late else None


def _still_writing(scene: Scene, memory: Coordinator, opened: float) -> bool:
    """Return True if workers of the last roster may run although their member's key is gone."""
    view, peers = scene.view, memory.peers
    if peers.orphaned or dataloss.may_register(scene, memory.timers, opened):
        return True
    members = view.members()
    seats = view.undone(scene.current.previous)
    for seat in seats:
        if seat.id in members:
            absence.returned(seat, memory.timers)
    absent = [seat for seat in seats if seat.id not in members]
    # Evaluate all, not only the first: each sets its own alarm.
    stopped = [
        absence.has_stopped(seat, view, scene.bounds, peers, memory.timers, opened)
        for seat in absent
    ]
    return not all(stopped)


def _backs_off(current: Round, timers: Timers) -> bool:
    """Return True while crash-loop back-off delays the recovery from a failure."""
    if current.previous not in current.charged:
        return False
    pause = crashes.pause_seconds(current.streak)
    over = timers.over(("pause", current.previous), pause)
    if over and pause:
        timers.since(("paused", current.number))
    return not over


def _join_timeout(scene: Scene, timers: Timers, wait: census.Wait) -> Act | None:
    """Close the job on a join timeout, which restarts while too few members can come."""
    bounds = scene.bounds
    can_come = bounds.expected is None or bounds.expected >= bounds.min_nodes
    if not can_come:
        timers.forget("join")
        return None
    if not timers.over("join", bounds.join_timeout_seconds):
        return None
    detail = f"no round within {bounds.join_timeout_seconds:g} s: {wait.reason}"
    return close(scene, Outcome(OutcomeKind.TIMED_OUT, detail))


def _freeze(scene: Scene, choice: census.Freeze) -> Act:
    """Ask the chosen members to confirm."""
    current, view = scene.current, scene.view
    cause = crashes.put_right(current, view.failures_of(current.previous).values())
    undone = view.undone(current.previous)
    cause = with_later_leaves(cause, undone, view.leaves, scene.bounds)
    frozen = replace(current, state=RoundState.FROZEN, ids=choice.ids, cause=cause)
    note = f"round {current.number} is frozen with {len(choice.ids)} members"
    return write_round(scene, frozen, note)
