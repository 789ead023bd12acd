"""Bugs planted in the real engine, to show that the simulation finds such bugs.

Each is a small change at the engine's edge (an event or an effect on its way) or to one of its
rules, made for the duration of a `with` block. The bugs are in `writes`, `rules` and
`swaps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from elasticjob_rendezvous.protocol.effects import Effect, Write
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import Clock, Event
from elasticjob_rendezvous.protocol.kv import Put, Txn
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.members import Round
from tests.sim.world import EngineFactory

Plant = Callable[[], AbstractContextManager[EngineFactory]]


@dataclass(frozen=True, slots=True)
class Bug:
    """Planted bug: `plant()` yields an engine with it for the duration of its block.

    `profile` is the kind of run in which to search for it, `seed` the one that found it last.
    """

    name: str
    profile: str
    plant: Plant
    seed: int | None = None


BUGS: list[Bug] = []


def swap(
    profile: str, owner: object, rule: str, seed: int | None = None
) -> Callable[[Callable[[Any], Any]], None]:
    """Add a bug that replaces one rule of `owner` by a function of it; see `bug`."""

    def add(change: Callable[[Any], Any]) -> None:
        @contextmanager
        def plant() -> Iterator[EngineFactory]:
            with patch.object(owner, rule, change(getattr(owner, rule))):
                yield Engine

        BUGS.append(Bug(change.__name__.replace("_", "-"), profile, plant, seed))

    return add


def bug(
    profile: str, seed: int | None = None
) -> Callable[[Callable[[], Iterator[EngineFactory]]], None]:
    """Add a bug to the catalogue; its docstring describes the wrong behaviour."""

    def add(change: Callable[[], Iterator[EngineFactory]]) -> None:
        BUGS.append(Bug(change.__name__.replace("_", "-"), profile, contextmanager(change), seed))

    return add


class Writes(Engine):
    """Engine whose outgoing transactions are changed."""

    def change(self, txn: Txn) -> Txn:
        raise NotImplementedError

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        effects = super().step(event, clock)
        for index, effect in enumerate(effects):
            if isinstance(effect, Write):
                effects[index] = Write(self.change(effect.txn))
                self._state.inflight.request = effects[index]  # type: ignore[assignment]
        return effects

    def puts_round(self, txn: Txn) -> Round | None:
        """Return the round that a transaction writes, if any."""
        for op in txn.success:
            if isinstance(op, Put) and op.key == self.view.keys.round:
                return decode(Round, op.key, op.value)
        return None


class Takes(Engine):
    """Engine that misreads an event."""

    def misread(self, event: Event, clock: Clock) -> Event:
        raise NotImplementedError

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        return super().step(self.misread(event, clock), clock)
