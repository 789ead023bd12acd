"""Invariants of the store: the protocol's guarantees, checked on every commit.

This module owns the record of sealed rosters, confirmations and fenced sessions; `running` and
`liveness` check the other guarantees. Each check states its own exceptions (a bound changed a
moment ago, a frozen machine).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.members import (
    NEXT_STATES,
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, legal_size
from tests.sim.invariants import causes, charging, checkpoints, repeated_losses
from tests.sim.invariants.crash_loop import Crashing
from tests.sim.processes.agent import UTC_START_MS
from tests.sim.processes.operator import OPERATOR

if TYPE_CHECKING:
    from tests.sim.etcd.simulated_etcd import Change
    from tests.sim.world import World

BOUNDS_MEMORY_SECONDS = 15.0
TROUBLE_MEMORY_SECONDS = 8.0


class Violation(AssertionError):
    """Violated invariant."""

    def __init__(self, invariant: str, detail: str, now: float) -> None:
        super().__init__(f"[{invariant}] at {now:.3f} s: {detail}")
        self.invariant = invariant
        self.detail = detail


class Checker:
    """Checker of commits.

    Attributes:
        sealed: the one roster of each number.
        highest: the highest round number ever written.
        closed_at: time at which the round was closed, or None.
        final_at: time at which a round last became final.
        final_numbers: all rounds that ever became final.
        sealed_at: time at which each of them was last sealed.
        written_at: revision -> time of its commit.
        reopened_at: number -> time at which the round after it was opened.
        unheard: members that were asked once and did not confirm.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.sealed: dict[int, Roster] = {}
        self.begun: set[int] = set()
        self.written_at: dict[int, float] = {}
        self.reopened_at: dict[int, float] = {}
        self.unheard: set[str] = set()
        self.highest = 0
        self.closed_at: float | None = None
        self.closed: Round | None = None
        self.final_at: float | None = None
        self.final_numbers: set[int] = set()
        self.sealed_at: dict[int, float] = {}
        self._fenced: set[str] = set()
        self._confirmed: dict[str, set[int]] = defaultdict(set)
        self._bounds: list[tuple[float, RendezvousParams]] = []
        self._frozen: tuple[int, int, frozenset[str]] | None = None
        self._done_at: dict[tuple[int, str], float] = {}
        self._came_at: dict[str, float] = {}
        self._registered_at: dict[str, float] = {}
        self._saved_at: dict[int, float] = {}
        self._checkpoints: dict[int, int] = {}
        self._round: Round | None = None
        self.crashing = Crashing(self)
        self.save_asked_at = 0.0

    def fail(self, invariant: str, detail: str) -> None:
        raise Violation(invariant, detail, self.world.now)

    def need(self, holds: bool, invariant: str, detail: str) -> None:
        if not holds:
            self.fail(invariant, detail)

    @property
    def round(self) -> Round | None:
        """Round record currently in etcd."""
        return self._round

    # -- commits --------------------------------------------------------------------

    def committed(self, revision: int, changes: tuple[Change, ...], origin: str) -> None:
        """Check one commit before any other process sees it."""
        self.world.lease_moved()
        self.written_at[revision] = self.world.now
        self.world.note("etcd", f"commit {revision} by {origin}", changes)
        self._check_fence(changes, origin)
        self._check_judged(changes, origin)
        for change in changes:
            match self.world.keys.parts(change.key):
                case ("bounds",):
                    self._bounds_changed(change)
                case ("members", id, _):
                    self._member_changed(id, change)
                case ("roster", number):
                    self._roster_changed(int(number), change)
                case ("done", number, id) if change.after is not None:
                    self._done_at.setdefault((int(number), id), self.world.now)
                    self.world.faults.strike()
        for change in changes:
            if change.key == self.world.keys.round:
                self._round_changed(change, origin)
        for change in changes:
            match self.world.keys.parts(change.key):
                case ("roster", number) if change.after is not None:
                    current = self._round
                    sealed = current is not None and current.state is RoundState.FINAL
                    sealed = sealed and current is not None and current.number == int(number)
                    self.need(sealed, "roster with final", f"{change.key} came before its round")

    def _check_fence(self, changes: tuple[Change, ...], origin: str) -> None:
        """Check that only sessions whose key exists, or is created here, write."""
        if origin in (OPERATOR, "lease"):
            return
        _, member, session = origin.split("|")
        key = self.world.keys.session(member, session)
        mine = [change for change in changes if change.key == key]
        if mine:
            self.need(key not in self._fenced, "fencing", f"{key} was deleted and came back")
        alive = bool(mine) or self.world.etcd.get(key) is not None
        self.need(alive, "fencing", f"{origin} has no key, but its write was accepted: {changes}")

    def _check_judged(self, changes: tuple[Change, ...], origin: str) -> None:
        """Check that a deleted session was seen in its last version: a newer one is adopted."""
        if origin in (OPERATOR, "lease"):
            return
        agent = self.world.agents[origin.split("|")[0]]
        for change in changes:
            match self.world.keys.parts(change.key):
                case ("members", id, session) if change.before and not change.after:
                    seen = agent.engine.view.sessions.get(id, {}).get(session)
                    judged = seen is not None and seen.modified == change.before.mod_revision
                    self.need(judged, "fencing", f"{origin} deleted {change.key} unseen")

    def _bounds_changed(self, change: Change) -> None:
        kept = self.world.plan.operator or change.before is None
        self.need(kept, "bounds are written once", f"{change}")
        if change.after is not None:
            bounds = decode(RendezvousParams, change.key, change.after.value)
            self._bounds.append((self.world.now, bounds))

    def _member_changed(self, id: str, change: Change) -> None:
        if change.after is None:
            self._fenced.add(change.key)
            self.world.truth.departures[id].append(self.world.now)
            return
        try:
            member = decode(Member, change.key, change.after.value)
        except MalformedRecord:
            return  # written by a test
        if member.confirmed:
            self._confirmed[id].add(member.confirmed)
        self._came_at.setdefault(id, self.world.now)
        if change.before is None:
            self._registered_at[change.key] = self.world.now
        if member.checkpoint_step > self._checkpoints.get(member.round, -1):
            self._checkpoints[member.round] = member.checkpoint_step
            self._saved_at[member.round] = self.world.now

    def _roster_changed(self, number: int, change: Change) -> None:
        if change.after is None:
            old = self._round is not None and number <= self._round.number - 9
            self.need(old, "one sealed membership", f"roster {number} was deleted too early")
            return
        roster = decode(Roster, change.key, change.after.value)
        if self._sealed_by_strangers(roster):
            self.sealed[number] = roster
            self.world.gangs.forget(number)
        known = self.sealed.setdefault(number, roster)
        self.need(roster == known, "one sealed membership", f"{known} became {roster}")
        self.need(change.before is None, "one sealed membership", f"{number} was written again")
        self.need(roster.number == number, "one sealed membership", f"{number}: {roster}")
        charging.check_ranks(self, roster)

    def _sealed_by_strangers(self, roster: Roster) -> bool:
        """Return True if etcd lost its data and the sealing members cannot know of the past.

        On a cluster the operator assigns another prefix in that case. Nor is there a past if the
        number was sealed and lost before any member began with it.
        """
        known = self.sealed.get(roster.number)
        if known is None or not self.world.truth.robbed:
            return False
        return roster.number not in self.begun or not {
            assignment.id for assignment in known.seats
        } & {assignment.id for assignment in roster.seats}

    # -- the round ------------------------------------------------------------------

    def _round_changed(self, change: Change, origin: str) -> None:
        if change.after is None:
            self.fail("transitions", "the round was deleted")
            return
        after = decode(Round, change.key, change.after.value)
        before = self._round
        self._round = after
        if change.before is None or before is None:
            self._check_first(after, origin)
        else:
            self._check_transition(before, after)
            charging.check_charges(self, before, after)
            charging.check_counts(self, before, after)
            self.crashing.changed(before, after)
            causes.check(self, before, after)
            repeated_losses.check(self, before, after)
        if after.number > self.highest:
            self.reopened_at[self.highest] = self.world.now
        self.highest = max(self.highest, after.number)
        checkpoints.check(self, before, after)
        new_state = before is None or before.state is not after.state
        # After a loss of etcd's data the same question may be asked again.
        new_state = new_state or (change.before is None and after.state is RoundState.FROZEN)
        if not new_state and before is not None and before.number == after.number:
            return
        self.world.faults.strike()
        match after.state:
            case RoundState.FROZEN:
                self._frozen_now(after, change.after)
            case RoundState.FINAL:
                self._final_now(after, restored=change.before is None)
            case RoundState.JOINABLE if before is not None and change.before is not None:
                if before.state is RoundState.FROZEN:
                    self.unheard |= set(before.ids)
                self._check_cause(before, after.cause, origin)
            case RoundState.CLOSED:
                self.closed_at = self.world.now
                self.closed = after
                charging.check_outcome(self, before, after)

    def _check_first(self, after: Round, origin: str) -> None:
        """Check a round written where there was none: the job's first, or after etcd lost its data.

        Its number was chosen when the write was sent, which may arrive seconds later: a member that
        registers in between makes the number jump then.
        """
        id = origin.split("|")[1]
        skew_ms = next(pod.utc_skew_ms for pod in self.world.pods if pod.id == id)
        chosen_at = (after.since_ms - skew_ms - UTC_START_MS + 1) / 1000
        came = self._registered_at
        there = [kv for kv in self.sessions() if kv.key in came and came[kv.key] <= chosen_at]
        members = [decode(Member, kv.key, kv.value) for kv in there]
        newest = max((member.known for member in members), default=0)
        last = max(self.sealed, default=0)
        # Of several sealed rounds, the newest known to the members that had returned by then.
        restored = after.state is RoundState.FINAL and newest <= after.number <= last
        opens = after.state in (RoundState.JOINABLE, RoundState.FROZEN)
        fresh = opens and after.number > newest
        self.highest = after.number
        self.need(restored or fresh, "numbers grow", f"{after} though {newest} was known")

    def _check_transition(self, before: Round, after: Round) -> None:
        moved = before.state is not after.state
        legal = not moved or after.state in NEXT_STATES[before.state]
        self.need(legal, "transitions", f"{before.state} became {after.state}")
        jumped = self.world.truth.robbed and after.number > before.number
        reopened = after.state is RoundState.JOINABLE and (moved or jumped)
        if reopened:
            higher = after.number > self.highest
            self.need(higher, "numbers grow", f"{before.number} was reopened as {after.number}")
        else:
            same = after.number == before.number
            self.need(same, "numbers grow", f"{before.number} became {after.number}")
        kept = set(before.charged) <= set(after.charged)
        self.need(kept, "charges", f"charges {before.charged} became {after.charged}")

    def _frozen_now(self, after: Round, stored: KeyValue) -> None:
        self._frozen = (after.number, stored.mod_revision, frozenset(after.ids))
        self.need(len(set(after.ids)) == len(after.ids), "sizes", f"twice in {after.ids}")
        self._check_size(len(after.ids))

    def _final_now(self, after: Round, restored: bool) -> None:
        number = after.number
        self.final_at = self.sealed_at[number] = self.world.now
        self.final_numbers.add(number)
        roster = self.sealed.get(number)
        stored = self.world.etcd.get(self.world.keys.roster(number))
        if roster is None or stored is None:
            self.fail("final has a roster", f"round {number} is final without one")
            return
        copy = self.world.etcd.get(self.world.keys.seats)
        same = copy is not None and copy.value == stored.value
        self.need(same, "one sealed membership", f"state/roster is not roster/{number}: {copy}")
        if restored:
            return
        causes.check_sealed(self, after, roster)
        causes.check_kept(self, number)
        self._check_size(len(roster.seats))
        frozen = self._frozen
        if frozen is None or frozen[0] != number:
            self.fail("confirmation", f"round {number} is final but was never frozen")
            return
        self.unheard |= frozen[2] - {assignment.id for assignment in roster.seats}
        for assignment in roster.seats:
            self.need(
                assignment.id in frozen[2], "confirmation", f"{assignment.name} was not asked"
            )
            answered = frozen[1] in self._confirmed[assignment.id]
            self.need(answered, "confirmation", f"{assignment.name} never confirmed round {number}")

    def recent_bounds(self) -> list[RendezvousParams]:
        """Return the bounds in force a moment ago, when a coordinator may have read them."""
        since = self.world.now - BOUNDS_MEMORY_SECONDS
        last = [bounds for at, bounds in self._bounds if at <= since][-1:]
        return last + [bounds for at, bounds in self._bounds if at > since]

    def _check_size(self, size: int) -> None:
        bounds = self.recent_bounds()
        legal = any(size > 0 and legal_size(b, size) == size for b in bounds)
        self.need(legal, "sizes", f"{size} members under {bounds}")

    def _check_cause(self, before: Round, cause: Cause, origin: str) -> None:
        """Check that newcomers open a round only to grow it, and none after a member is done."""
        notice = 0.1 + 2.0 * self.world.plan.slow_seconds
        sealed = self.sealed.get(before.number)
        done_at = {
            id: at
            for (n, id), at in self._done_at.items()
            if n == before.number and sealed is not None and sealed.assignment(id) is not None
        }
        known_done = any(self.world.now - at > notice for at in done_at.values())
        if cause.kind is CauseKind.LOSS and not self.in_trouble():
            seats = sealed.seats if sealed is not None else ()
            missed = {assignment.name for assignment in seats if assignment.id in done_at} & set(
                cause.members
            )
            self.need(not missed, "finishing", f"{missed} were done in {before.number}: {cause}")
        if cause.kind not in (CauseKind.JOIN, CauseKind.SCALE_DOWN):
            return
        if known_done and not self.in_trouble():
            self.fail("finishing", f"round {before.number} had a done member: {cause}")
        if (
            cause.kind is CauseKind.JOIN and before.save is None
        ):  # a member asked to save is stopped
            present = len({kv.key.split("/")[-2] for kv in self.sessions()})
            died = sum(
                any(at > self.world.now - TROUBLE_MEMORY_SECONDS for at in times)
                for times in self.world.truth.departures.values()
            )
            grows = any(
                legal_size(bounds, present + died) > before.nodes for bounds in self.recent_bounds()
            )
            self.need(grows, "surplus waits", f"{cause} reopened a round of {before.nodes}")
            self._check_waited(before, cause)

    def _check_waited(self, before: Round, cause: Cause) -> None:
        """Check that newcomers waited for a checkpoint or for the scale-up wait.

        The wait counts from the first of them, which may have left meanwhile.
        """
        wait = min(bounds.scale_up_wait_seconds for bounds in self.recent_bounds())
        seated = {assignment.id for assignment in self.sealed[before.number].seats}
        came = min((at for id, at in self._came_at.items() if id not in seated), default=0.0)
        saved = self._saved_at.get(before.number, -1.0) > came
        waited = self.world.now - came >= wait
        self.need(saved or waited, "newcomers wait", f"{cause} after {self.world.now - came:.2f} s")

    def in_trouble(self) -> bool:
        """Return True if a recent fault may have delayed news."""
        return self.world.now - self.world.truth.troubled_at < TROUBLE_MEMORY_SECONDS

    def is_disturbed(self) -> bool:
        """Return True if a fault delays news now, or did a moment ago."""
        world = self.world
        calm = world.etcd_up and not world.etcd_full and world.network.is_whole
        return not calm or any(pod.frozen for pod in world.pods) or self.in_trouble()

    def sessions(self) -> tuple[KeyValue, ...]:
        return self.world.etcd.range(Range(self.world.keys.members, prefix=True)).kvs

    def sessions_of(self, id: str) -> tuple[KeyValue, ...]:
        return self.world.etcd.range(Range(self.world.keys.sessions(id), prefix=True)).kvs

    def registered_seconds(self, id: str) -> float:
        """Return the time since the newest session of a member registered; 0 without one."""
        keys = [kv.key for kv in self.sessions_of(id)]
        times = [self._registered_at[key] for key in keys if key in self._registered_at]
        return self.world.now - max(times, default=self.world.now)

    def wiped(self) -> None:
        """Reset after etcd lost its data: sessions are over, numbers and rosters are not."""
        self._frozen = None
        self.written_at.clear()
