"""Planted bugs in writes and in the reading of answers; see `planting`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from elasticjob_rendezvous.protocol.directives import Directive, Run
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Clock,
    Event,
    TxnAmbiguous,
    TxnDone,
    WatchBroken,
)
from elasticjob_rendezvous.protocol.kv import Delete, Op, Put, Txn, TxnResult
from elasticjob_rendezvous.protocol.records import roster
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.requests import InFlight
from tests.sim.planted_bugs.planting import Takes, Writes, bug
from tests.sim.world import EngineFactory


@bug("chaos", seed=100)
def fence_left_out() -> Iterator[EngineFactory]:
    """Write the round without any comparison."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            return replace(txn, compares=()) if self.puts_round(txn) else txn

    yield Planted


@bug("etcd-trouble", seed=28)
def own_key_written_blindly() -> Iterator[EngineFactory]:
    """Write a member's own key without comparing: a fenced session comes back."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            own = self.view.keys.session(self.config.identity.id, self.session)
            mine = any(isinstance(op, Put) and op.key == own for op in txn.success)
            return replace(txn, compares=()) if mine else txn

    yield Planted


@bug("chaos", seed=164)
def late_revocation() -> Iterator[EngineFactory]:
    """Delete all sessions of a member, an adopter's too, to fence one."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            own = self.view.keys.sessions(self.config.identity.id)
            ops: list[Op] = []
            fenced = set()
            for op in txn.success:
                foreign = isinstance(op, Delete) and op.key.startswith(self.view.keys.members)
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


@bug("churn", seed=0)
def number_used_twice() -> Iterator[EngineFactory]:
    """Keep the number of a round that is opened again."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            new, old = self.puts_round(txn), self.view.round
            if new is None or old is None or new.number == old.record.number:
                return txn
            again = encode(replace(new, number=old.record.number))
            ops = tuple(
                replace(op, value=again)
                if isinstance(op, Put) and op.key == self.view.keys.round
                else op
                for op in txn.success
            )
            return replace(txn, success=ops)

    yield Planted


@bug("quiet", seed=0)
def roster_before_final() -> Iterator[EngineFactory]:
    """Write the roster together with `frozen`, before any confirmation."""

    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            new = self.puts_round(txn)
            if new is None or new.state is not RoundState.FROZEN:
                return txn
            members = self.view.members()
            asked = [members[id].record for id in new.ids if id in members]
            early = Put(
                self.view.keys.roster(new.number), encode(roster.seal(new.number, asked, 0))
            )
            return replace(txn, success=(*txn.success, early))

    yield Planted


@bug("quiet", seed=0)
def starts_on_frozen() -> Iterator[EngineFactory]:
    """Start workers once their own member has confirmed, without the others."""

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


@bug("etcd-trouble", seed=92)
def ambiguous_taken_for_done() -> Iterator[EngineFactory]:
    """Treat a transaction of unknown outcome as applied."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            if not isinstance(event, TxnAmbiguous):
                return event
            revision = self.view.revision + 1
            return TxnDone(TxnResult(True, revision, self.view.cluster_id))

    yield Planted


@bug("etcd-trouble")
def lost_data_unnoticed() -> Iterator[EngineFactory]:
    """Ignore the cluster id: data that etcd lost is still believed."""

    with patch.object(InFlight, "shows_data_loss", lambda *_: False):
        yield Engine


@bug("etcd-trouble", seed=1)
def broken_watch_ignored() -> Iterator[EngineFactory]:
    """Treat a broken watch as a quiet one."""

    class Planted(Takes):
        def misread(self, event: Event, clock: Clock) -> Event:
            return Changed(0, 0, ()) if isinstance(event, WatchBroken) else event

    yield Planted
