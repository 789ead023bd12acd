"""Bugs put into the real engine on purpose, to show that the simulation finds such bugs.

Each is a small change at the engine's edge (an event or an effect on its way) or to one
of its rules, made for the time of a `with` block. Owns the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from elasticjob_rendezvous.core import census, coordinator, directing, finals, roster, verdicts
from elasticjob_rendezvous.core.codec import decode, encode
from elasticjob_rendezvous.core.engine import Engine
from elasticjob_rendezvous.core.events import (
    Changed,
    Clock,
    Directive,
    Effect,
    Event,
    Granted,
    KeptAlive,
    Probed,
    Run,
    TxnAmbiguous,
    TxnDone,
    Verdict,
    WatchBroken,
    Write,
)
from elasticjob_rendezvous.core.kv import Compare, Delete, Op, Put, Txn, TxnResult
from elasticjob_rendezvous.core.records import Bounds, Cause, CauseKind, Roster, Round, RoundState
from elasticjob_rendezvous.core.safety import Safety
from elasticjob_rendezvous.core.view import View
from tests.sim.world import EngineFactory

Plant = Callable[[], AbstractContextManager[EngineFactory]]


@dataclass(frozen=True, slots=True)
class Bug:
    """`plant()` gives, for the time of its block, an engine with the bug.

    `profile` is the kind of run to look for it in.
    """

    name: str
    profile: str
    plant: Plant


BUGS: list[Bug] = []


def bug(profile: str) -> Callable[[Callable[[], Iterator[EngineFactory]]], None]:
    """Add one to the catalogue; its docstring says what is wrong."""

    def add(change: Callable[[], Iterator[EngineFactory]]) -> None:
        BUGS.append(Bug(change.__name__.replace("_", "-"), profile, contextmanager(change)))

    return add


class Writes(Engine):
    """An engine whose transactions are changed on their way out."""

    def change(self, txn: Txn) -> Txn:
        raise NotImplementedError

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        effects = super().step(event, clock)
        for index, effect in enumerate(effects):
            if isinstance(effect, Write):
                effects[index] = Write(self.change(effect.txn))
                self._busy = effects[index]  # type: ignore[assignment]
        return effects

    def puts_round(self, txn: Txn) -> Round | None:
        """The round that a transaction writes, if it does."""
        for op in txn.success:
            if isinstance(op, Put) and op.key == self.keys.round:
                return decode(Round, op.key, op.value)
        return None


class Takes(Engine):
    """An engine that misreads an event."""

    def misread(self, event: Event, clock: Clock) -> Event:
        raise NotImplementedError

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        return super().step(self.misread(event, clock), clock)


# -- writes -------------------------------------------------------------------------


@bug("chaos")
def fence_left_out() -> Iterator[EngineFactory]:
    """The coordinator writes the round without comparing anything."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            return replace(txn, compares=()) if self.puts_round(txn) else txn

    yield Planted


@bug("etcd-trouble")
def own_key_written_blindly() -> Iterator[EngineFactory]:
    """A member writes its own key without comparing: a fenced session comes back."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            own = self.keys.session(self.config.identity.id, self.session)
            mine = any(isinstance(op, Put) and op.key == own for op in txn.success)
            return replace(txn, compares=()) if mine else txn

    yield Planted


@bug("chaos")
def late_revocation() -> Iterator[EngineFactory]:
    """To fence one session, all sessions of the member are deleted, an adopter's too."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            own = self.keys.sessions(self.config.identity.id)
            ops: list[Op] = []
            fenced = set()
            for op in txn.success:
                foreign = isinstance(op, Delete) and op.key.startswith(self.keys.members)
                folder = op.key.rsplit("/", 1)[0] + "/"
                moves = any(isinstance(o, Put) and o.key.startswith(folder) for o in txn.success)
                if foreign and not moves and not op.key.startswith(own):
                    fenced.add(op.key)
                    ops.append(Delete(folder, prefix=True))
                else:
                    ops.append(op)
            kept = tuple(compare for compare in txn.compares if compare.key not in fenced)
            return replace(txn, compares=kept, success=tuple(ops))

    yield Planted


@bug("churn")
def number_used_twice() -> Iterator[EngineFactory]:
    """A round that is opened again keeps its number."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            new, old = self.puts_round(txn), self.view.round
            if new is None or old is None or new.number == old.record.number:
                return txn
            again = encode(replace(new, number=old.record.number))
            ops = tuple(
                replace(op, value=again)
                if isinstance(op, Put) and op.key == self.keys.round
                else op
                for op in txn.success
            )
            return replace(txn, success=ops)

    yield Planted


@bug("quiet")
def roster_before_final() -> Iterator[EngineFactory]:
    """The roster is written with `frozen`, before anybody confirmed."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            new = self.puts_round(txn)
            if new is None or new.state is not RoundState.FROZEN:
                return txn
            members = self.view.members()
            asked = [members[id].record for id in new.ids if id in members]
            early = Put(self.keys.roster(new.number), encode(roster.seal(new.number, asked, 0)))
            return replace(txn, success=(*txn.success, early))

    yield Planted


@bug("quiet")
def starts_on_frozen() -> Iterator[EngineFactory]:
    """Workers start once their member has confirmed; who else did is not awaited."""

    class Planted(Engine):
        def _direct(self) -> Directive:
            directive = super()._direct()
            at = self.view.round
            members = self.view.members()
            if at is None or at.record.state is not RoundState.FROZEN or isinstance(directive, Run):
                return directive
            me = members.get(self.config.identity.id)
            if me is None or me.record.confirmed != at.modified:
                return directive
            asked = [members[id].record for id in at.record.ids if id in members]
            return Run(roster.seal(at.record.number, asked, 0), self.config.identity.id)

    yield Planted


@bug("etcd-trouble")
def ambiguous_taken_for_done() -> Iterator[EngineFactory]:
    """A transaction of unknown outcome is believed to have been applied."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if not isinstance(event, TxnAmbiguous):
                return event
            revision = self.view.revision + 1
            return TxnDone(TxnResult(True, revision, self.view.cluster_id))

    yield Planted


@bug("etcd-trouble")
def lost_data_unnoticed() -> Iterator[EngineFactory]:
    """The cluster's id is not looked at: what etcd forgot is still believed."""

    class Planted(Engine):
        def _data_lost(self, *_: Any) -> bool:
            return False

    yield Planted


@bug("etcd-trouble")
def broken_watch_ignored() -> Iterator[EngineFactory]:
    """A watch that broke is taken for one that is merely quiet."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            return Changed(0, 0, ()) if isinstance(event, WatchBroken) else event

    yield Planted


# -- the coordinator's rules --------------------------------------------------------


@bug("partition")
def isolated_coordinator_shoots() -> Iterator[EngineFactory]:
    """A probe that nobody answered is taken for a proof of death."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if isinstance(event, Probed) and event.verdict is Verdict.UNKNOWN:
                return replace(event, verdict=Verdict.GONE)
            return event

    yield Planted


@bug("pause")
def old_confirmation_counts() -> Iterator[EngineFactory]:
    """Whoever ever confirmed a frozen round counts as having confirmed this one."""

    def lie(view: Any, id: str, original: Any = View.member) -> Any:
        found = original(view, id)
        at = view.round
        if found is None or not found.record.confirmed or at is None:
            return found
        return replace(found, record=replace(found.record, confirmed=at.modified))

    frozen = coordinator.Coordinator._frozen

    def planted(*args: Any) -> Any:
        with patch.object(View, "member", lie):
            return frozen(*args)

    with patch.object(coordinator.Coordinator, "_frozen", planted):
        yield Engine


@bug("churn")
def final_beside_old_workers() -> Iterator[EngineFactory]:
    """The next round does not wait until the last one's workers have stopped."""
    take = census.take

    def planted(*args: Any) -> census.Census:
        count = take(*args)
        waiting = {member.id for member in count.waiting}
        return replace(count, unstopped=(), survivors=count.survivors & waiting)

    with patch.object(census, "take", planted):
        yield Engine


@bug("churn")
def aborts_charged_at_once() -> Iterator[EngineFactory]:
    """An aborted collective costs a restart without waiting for a loss that explains it."""
    with patch.object(verdicts, "speaks_for_itself", lambda failures: bool(list(failures))):
        yield Engine


@bug("churn")
def verdict_without_window() -> Iterator[EngineFactory]:
    """The verdict on an aborted collective comes after a tenth of its time."""
    window = verdicts.window_seconds
    with patch.object(verdicts, "window_seconds", lambda bounds: window(bounds) / 10):
        yield Engine


@bug("churn")
def budget_off_by_one() -> Iterator[EngineFactory]:
    """The job fails with the last restart it was granted."""
    with patch.object(verdicts, "spent", lambda charged, b: len(tuple(charged)) >= b.max_restarts):
        yield Engine


@bug("finishing")
def done_member_missed() -> Iterator[EngineFactory]:
    """A member that was done and went counts as lost."""
    look = finals.look_at_final

    def planted(view: Any, seated: Roster, *rest: Any) -> finals.FinalLook:
        found = look(view, seated, *rest)
        done = view.dones.get(seated.number, {})
        missed = tuple(
            seat.name for seat in seated.seats if seat.id in done and view.member(seat.id) is None
        )
        if found.cause is None and not found.succeeded and missed:
            return replace(found, cause=Cause(CauseKind.LOSS, missed))
        return found

    with patch.object(coordinator, "look_at_final", planted):
        yield Engine


@bug("finishing")
def success_at_first_done() -> Iterator[EngineFactory]:
    """The job succeeds with the first member that is done."""
    look = finals.look_at_final

    def planted(view: Any, seated: Roster, *rest: Any) -> finals.FinalLook:
        if view.dones.get(seated.number):
            return finals.FinalLook(succeeded=True)
        return look(view, seated, *rest)

    with patch.object(coordinator, "look_at_final", planted):
        yield Engine


@bug("finishing")
def newcomers_after_done() -> Iterator[EngineFactory]:
    """Newcomers open a round although a member is done already."""
    look = finals.look_at_final

    def planted(view: Any, seated: Roster, bounds: Bounds, *rest: Any) -> finals.FinalLook:
        found = look(view, seated, bounds, *rest)
        ids = {seat.id for seat in seated.seats}
        new = [m.record.name for id, m in view.members().items() if id not in ids]
        room = len(ids) < bounds.max_nodes and bounds.increment == 1
        waits = not (found.succeeded or found.cause) and view.dones.get(seated.number)
        if waits and new and room:
            return replace(found, cause=Cause(CauseKind.JOIN, tuple(new)))
        return found

    with patch.object(coordinator, "look_at_final", planted):
        yield Engine


@bug("scale")
def surplus_opens_rounds() -> Iterator[EngineFactory]:
    """A member that has no place opens a round all the same."""
    with patch.object(finals, "legal_size", lambda bounds, available: available):
        yield Engine


@bug("scale")
def increment_forgotten() -> Iterator[EngineFactory]:
    """Any size between the least and the most is taken."""

    def planted(bounds: Bounds, available: int) -> int:
        top = min(available, bounds.max_nodes)
        return top if top >= bounds.min_nodes else 0

    with patch.object(census, "legal_size", planted):
        yield Engine


@bug("quiet")
def ranks_by_arrival() -> Iterator[EngineFactory]:
    """Ranks follow the order in which members came, not their names."""
    with patch.object(roster, "by_name", lambda members: list(members)[::-1]):
        yield Engine


# -- the member's rules -------------------------------------------------------------


@bug("partition")
def deadline_from_the_answer() -> Iterator[EngineFactory]:
    """A lease counts from when the answer came, not from when it was asked for."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if isinstance(event, Granted | KeptAlive):
                ttl = self.lease.ttl_seconds
                return replace(event, deadline=clock.now + ttl)
            return event

    yield Planted


@bug("partition")
def runs_past_its_lease() -> Iterator[EngineFactory]:
    """A member that is cut off trains on for as long as it likes."""
    with patch.object(Safety, "may_run", lambda *_: True):
        yield Engine


@bug("pause")
def starts_past_its_lease() -> Iterator[EngineFactory]:
    """Workers start without a look at the lease."""
    start = directing._may_start

    def planted(own: Any, current: Round) -> bool:
        return start(replace(own, lease_holds=True), current)

    with patch.object(directing, "_may_start", planted):
        yield Engine


@bug("chaos")
def fence_on_a_guess() -> Iterator[EngineFactory]:
    """Sessions are fenced by name, whatever was written to them since they were judged."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            deleted = {op.key for op in txn.success if isinstance(op, Delete)}

            def kept(compare: Compare) -> bool:
                return compare.key not in deleted

            return replace(txn, compares=tuple(filter(kept, txn.compares)))

    yield Planted
