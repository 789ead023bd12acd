"""Single engine beside the simulated etcd, answered step by step and without delay."""

from __future__ import annotations

from types import UnionType
from typing import Any, Self

from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.directives import Directive
from elasticjob_rendezvous.protocol.effects import (
    Effect,
    Grant,
    KeepAlive,
    Read,
    Unwatch,
    Watch,
    Write,
)
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Clock,
    Event,
    Granted,
    KeptAlive,
    LeaseGone,
    LocalChanged,
    ReadDone,
    Started,
    Tick,
    TxnDone,
    WatchOpened,
)
from elasticjob_rendezvous.protocol.kv import WatchBatch
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.sim.etcd.simulated_etcd import SimEtcd, Watcher
from tests.unit.rendezvous.builders import KEYS, START, UTC_MS, identity

READY = Local(ready=True, master_port=20000)
Request = Grant | Read | Write


class Node:
    """Agent of member `name`.

    `said` holds all effects so far. While `held`, etcd answers nothing and no lease expires;
    otherwise every event is followed to its end.
    """

    def __init__(self, etcd: SimEtcd, name: str, **config: Any) -> None:
        self.etcd = etcd
        self.name = name
        plain = {"bounds": RendezvousParams(1, 4), "jitter": 0.0, **config}
        me = Identity(identity(name), name, f"host-{name}", 7000, 7001)
        self.engine = Engine(Config(KEYS.prefix, me, f"n-{name}", **plain))
        self.now = START
        self.held = False
        self.request: Request | None = None
        self.said: list[Effect] = []
        self.requests: list[Request] = []
        self._inbox: list[Event] = []
        self._watches: dict[int, list[Watcher]] = {}

    # -- events -----------------------------------------------------------------------

    def start(self, local: Local = READY) -> Self:
        return self.hear(Started()).hear(LocalChanged(local))

    def hear(self, event: Event) -> Self:
        """Process one event and, unless held, all events that follow from it."""
        self._inbox.append(event)
        while self._inbox or (self.request is not None and not self.held):
            if self._inbox:
                self._step(self._inbox.pop(0))
            else:
                self.answer()
        return self

    def later(self, seconds: float) -> Self:
        """Let time pass, waking the engine at each requested time."""
        until = self.now + seconds
        while self.engine.wake_at is not None and self.engine.wake_at <= until:
            self.now = max(self.now, self.engine.wake_at)
            if not self.held:
                self.etcd.expire(self.now)
            self.hear(Tick())
        self.now = until
        return self.hear(Tick())

    def _step(self, event: Event) -> None:
        for effect in self.engine.step(event, Clock(self.now, UTC_MS)):
            self.said.append(effect)
            match effect:
                case Grant() | Read() | Write():
                    assert self.request is None, "two requests at once"
                    self.request = effect
                    self.requests.append(effect)
                case KeepAlive(lease) if not self.held:
                    ttl_seconds = self.etcd.keep_alive(lease, self.now)
                    kept = KeptAlive(lease, self.now + ttl_seconds)
                    self._inbox.append(kept if ttl_seconds else LeaseGone(lease))
                case Watch():
                    self._watch(effect)
                case Unwatch(generation):
                    for watcher in self._watches.pop(generation, []):
                        self.etcd.cancel(watcher)

    # -- etcd's answers ---------------------------------------------------------------

    def answer(self) -> Self:
        """Answer the request that is under way."""
        assert self.request is not None, "no request is under way"
        event = self.outcome()
        self._inbox.append(event)
        return self

    def outcome(self) -> Event:
        """Execute the request that is under way; return its answer without delivering it."""
        request, self.request = self.request, None
        match request:
            case Grant(ttl_seconds):
                lease = self.etcd.grant(ttl_seconds, self.now)
                return Granted(lease.id, self.now + lease.ttl_seconds)
            case Read(ranges):
                found = tuple((target, self.etcd.range(target).kvs) for target in ranges)
                return ReadDone(self.etcd.revision, self.etcd.cluster_id, found)
            case Write(txn):
                return TxnDone(self.etcd.txn(txn))
        raise AssertionError("no request is under way")

    def fail(self, event: Event) -> Self:
        """Deliver this answer to the request that is under way, without executing it."""
        assert self.request is not None, "no request is under way"
        self.request = None
        return self.hear(event)

    def _watch(self, watch: Watch) -> None:
        generation = watch.generation

        def sink(batch: WatchBatch) -> None:
            self._inbox.append(Changed(generation, batch.revision, batch.events))

        self._inbox.append(WatchOpened(generation, self.etcd.revision, self.etcd.cluster_id))
        self._watches[generation] = [
            self.etcd.watch(target, watch.revision, sink) for target in watch.ranges
        ]

    # -- results ----------------------------------------------------------------------

    @property
    def directive(self) -> Directive:
        return self.engine.directive

    def made(self, kind: type[Any] | UnionType) -> list[Any]:
        """Return the effects of this kind, oldest first."""
        return [effect for effect in self.said if isinstance(effect, kind)]
