"""Round writes: one transaction each, which a deposed coordinator cannot commit. Pure.

Every write compares the round's mod_revision and the create_revision of the coordinator's own
session key, so a deposed or mistaken coordinator changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.events import Clock
from elasticjob_rendezvous.core.kv import Compare, Op, Put, Range, Target, Txn
from elasticjob_rendezvous.core.records import Member, Round, RoundState
from elasticjob_rendezvous.core.view import Versioned, View

DELETES_PER_TXN = 50
"""Maximum deletions in one transaction; leaves room for its other operations."""


@dataclass(frozen=True, slots=True)
class Act:
    """Transaction with the log line that explains it."""

    txn: Txn
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """Snapshot that a coordinator decides on: everything known at one moment.

    `own` is the coordinator's own key, `bounds` the rendezvous parameters in force.
    """

    view: View
    own: Versioned[Member]
    bounds: Bounds
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
    scene: Scene,
    new: Round,
    note: str,
    ops: tuple[Op, ...] = (),
    compares: tuple[Compare, ...] = (),
) -> Act:
    """Return the write of the round, and of everything that must become true together with it."""
    view, own, keys = scene.view, scene.own, scene.view.keys
    revision = view.round.modified if view.round else 0
    others = [m for m in view.members().values() if m.key != own.key]
    second = min(others, key=lambda member: member.created, default=None)
    record = replace(
        new,
        coordinator=own.record.id,
        successor=second.record.id if second else "",
        since_ms=scene.clock.utc_ms,
        save=new.save if new.state is RoundState.FINAL else None,
        fenced=() if new.state is RoundState.FINAL else new.fenced,
    )
    return Act(
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
