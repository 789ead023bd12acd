"""Rehearsal of a rendezvous: two members in memory, run once before the real one. No I/O.

The first execution of code takes several times as long as later ones. A member runs this while it
connects, so that no round waits for first executions. The results are discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.effects import Effect, Grant, Read, Watch, Write
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Clock,
    Event,
    Granted,
    LocalChanged,
    ReadDone,
    Started,
    TxnDone,
    WatchOpened,
)
from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Deleted,
    KeyValue,
    Order,
    Put,
    Range,
    Target,
    Txn,
    TxnResult,
    WatchEvent,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Local

Answered = Callable[[Txn, TxnResult], TxnResult]
Seen = Callable[[tuple[WatchEvent, ...]], tuple[WatchEvent, ...]]
MEMBERS = 2
MOST_STEPS = 200
STEP_SECONDS = 0.001
_CLUSTER = 1


@dataclass(slots=True)
class _Store:
    """Part of an etcd that a first round needs."""

    kvs: dict[str, KeyValue] = field(default_factory=dict)
    revision: int = 1

    def range(self, target: Range) -> tuple[KeyValue, ...]:
        found = [kv for kv in self.kvs.values() if target.covers(kv.key)]
        if target.order is Order.CREATE:
            found.sort(key=lambda kv: kv.create_revision)
        return tuple(found[: target.limit or None])

    def holds(self, compare: Compare) -> bool:
        kv = self.kvs.get(compare.key)
        if kv is None:
            return compare.revision == 0
        created = compare.target is Target.CREATE
        return compare.revision == (kv.create_revision if created else kv.mod_revision)

    def apply(self, txn: Txn) -> tuple[TxnResult, tuple[WatchEvent, ...]]:
        succeeded = all(map(self.holds, txn.compares))
        ops = txn.success if succeeded else txn.failure
        events: list[WatchEvent] = []
        if any(isinstance(op, Put | Delete) for op in ops):
            self.revision += 1
        ranges = []
        for op in ops:
            if isinstance(op, Put):
                old = self.kvs.get(op.key)
                created = old.create_revision if old else self.revision
                kv = KeyValue(op.key, op.value, created, self.revision, op.lease)
                self.kvs[op.key] = kv
                events.append(kv)
            elif isinstance(op, Range):
                ranges.append((op, self.range(op)))
            elif self.kvs.pop(op.key, None):
                events.append(Deleted(op.key, self.revision))
        return TxnResult(succeeded, self.revision, _CLUSTER, tuple(ranges)), tuple(events)


def _config(index: int) -> Config:
    name = f"member-{index}"
    identity = Identity(name, name, "127.0.0.1", agent_port=1)
    return Config("/rehearsal/", identity, f"nonce{index}", RendezvousParams(MEMBERS, MEMBERS))


class _Play:
    """Two engines and their store; the queue delivers the results of each engine's effects."""

    def __init__(self, answered: Answered, seen: Seen) -> None:
        self._answered = answered
        self._seen = seen
        self._store = _Store()
        self.engines = [Engine(_config(index)) for index in range(MEMBERS)]
        self._watches: dict[tuple[int, int], tuple[Range, ...]] = {}
        self._queue: deque[tuple[int, Event]] = deque()

    def run(self) -> bool:
        """Run until nothing happens any more; return True if both members came to a round."""
        for index in range(MEMBERS):
            self._queue.append((index, Started()))
            self._queue.append((index, LocalChanged(Local(ready=True, master_port=1))))
        for step in range(MOST_STEPS):
            if not self._queue:
                break
            index, event = self._queue.popleft()
            now = STEP_SECONDS * step
            for effect in self.engines[index].step(event, Clock(now, 0)):
                self._perform(index, effect, now)
        return all(isinstance(engine.hand_over(), Run) for engine in self.engines)

    def _perform(self, index: int, effect: Effect, now: float) -> None:
        post = self._queue.append
        match effect:
            case Grant(ttl_seconds):
                post((index, Granted(index + 1, now + ttl_seconds)))
            case Watch(generation, ranges):
                self._watches[index, generation] = ranges
                post((index, WatchOpened(generation, self._store.revision, _CLUSTER)))
            case Read(ranges):
                found = tuple((target, self._store.range(target)) for target in ranges)
                post((index, ReadDone(self._store.revision, _CLUSTER, found)))
            case Write(txn):
                result, events = self._store.apply(txn)
                for (watcher, generation), ranges in self._watches.items():
                    seen = tuple(e for e in events if any(r.covers(e.key) for r in ranges))
                    if seen:
                        seen = self._seen(seen)
                        post((watcher, Changed(generation, self._store.revision, seen)))
                post((index, TxnDone(self._answered(txn, result))))
            case _:
                pass


def rehearse(
    answered: Answered = lambda txn, result: result, seen: Seen = lambda events: events
) -> bool:
    """Run the rehearsal; return True if both members came to a round.

    Answers and events go through `answered` and `seen`, which lets a caller warm up its own code,
    too.
    """
    return _Play(answered, seen).run()
