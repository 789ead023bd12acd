"""Driver of an engine: turns its effects into etcd requests and links, and replies into events.

The driver owns the only event list of the engine, so a single loop steps the engine. The same
loop sends keep-alives: an agent whose loop is stuck loses its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

from elasticjob_launcher.proof import Peer
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    EtcdError,
    InvalidRequest,
    LeaseLost,
    Terminal,
)
from elasticjob_rendezvous.etcd.reachability import all_refuse
from elasticjob_rendezvous.links import dial, wire
from elasticjob_rendezvous.links.server import PeerServer
from elasticjob_rendezvous.protocol.effects import (
    Effect,
    Grant,
    KeepAlive,
    Link,
    Note,
    Probe,
    Read,
    SendLeaveNotices,
    Serve,
    Unlink,
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
    ReadDone,
    RequestFailed,
    Started,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    WatchBroken,
    WatchOpened,
)
from elasticjob_rendezvous.protocol.kv import Put, Range, Txn, TxnResult
from elasticjob_rendezvous.store_monitor import system_clock

log = logging.getLogger(__name__)

LINK_DELAY_SECONDS = 0.2
LARGE_GANG = 16
"""Minimum number of sessions at which the coordinator batches changes."""
GATHER_SECONDS = 0.01
"""Maximum delay of a change while the coordinator batches changes."""


def _merged(events: list[Event]) -> list[Event]:
    """Merge consecutive changes of one watch into one event, which the engine handles at once."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, Changed)
            and isinstance(last, Changed)
            and last.generation == event.generation
        ):
            both = last.events + event.events
            merged[-1] = Changed(event.generation, event.revision, both)
        else:
            merged.append(event)
    return merged


class Driver:
    """Event loop of one engine. `run` ends only on cancellation or on a defect.

    Args:
        engine: the protocol; only the driver steps it.
        on_step: called after every step, since the directive may have changed.
    """

    def __init__(
        self,
        engine: Engine,
        client: Client,
        endpoints: tuple[str, ...],
        server: PeerServer,
        job_key: bytes,
        on_step: Callable[[], None],
        clock: Callable[[], Clock] = system_clock,
    ) -> None:
        self._engine = engine
        self._client = client
        self._endpoints = endpoints
        self._server = server
        self._job_key = job_key
        self._on_step = on_step
        self._clock = clock
        self._events: list[Event] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._defect: asyncio.Future[None] | None = None
        self._pump_due: asyncio.TimerHandle | None = None
        self._gathered = 0  # changes since the last step
        self._pumping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._link: asyncio.Task[None] | None = None
        self._leaving: wire.Leaving = ()
        self._checking_reach = False
        self._renewals = 0
        self._refused = ""

    def post(self, event: Event) -> None:
        """Pass an event to the engine at once or, when changes are batched, within GATHER_SECONDS.

        Call it from the loop's own thread.
        """
        self._events.append(event)
        if self._loop is None or self._pumping:
            return
        if not (isinstance(event, Changed) and self._is_large_gang()) or self._all_have_written(
            event
        ):
            self._pump()
        elif self._pump_due is None:
            self._pump_due = self._loop.call_later(GATHER_SECONDS, self._pump)

    def _is_large_gang(self) -> bool:
        """Return True if this member coordinates so many sessions that changes are batched."""
        return self._engine.coordinator.active and len(self._engine.view.sessions) >= LARGE_GANG

    def _all_have_written(self, event: Changed) -> bool:
        """Return True if all members that the coordinator waits for may have written."""
        self._gathered += len(event.events)
        return 0 < self._engine.coordinator.awaited <= self._gathered

    def use_key(self, job_key: bytes) -> None:
        """Use this key for handshakes from now on."""
        self._job_key = job_key
        self._server.use_key(job_key)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._defect = self._loop.create_future()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._events.insert(0, Started())
            self._pump()
            try:
                await self._defect
            finally:
                self._loop = None
                for handle in (self._pump_due, self._timer):
                    if handle is not None:
                        handle.cancel()

    def _pump(self) -> None:
        """Step the engine through all queued events, then set the timer for the next `Tick`."""
        if self._loop is None or self._defect is None or self._defect.done():
            return
        if self._pump_due is not None:
            self._pump_due.cancel()
            self._pump_due = None
        self._pumping = True
        self._gathered = 0
        try:
            while self._events:
                events, self._events = self._events, []
                for event in _merged(events):
                    self._step(event)
        except Exception as error:
            self._defect.set_exception(error)
            return
        finally:
            self._pumping = False
        self._wake(self._engine.wake_at)

    def _wake(self, at: float | None) -> None:
        """Set the timer for that time, unless it already fires earlier."""
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - self._clock().now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())

    def _step(self, event: Event) -> None:
        for effect in self._engine.step(event, self._clock()):
            self._perform(effect)
        self._on_step()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        return self._tasks.create_task(work)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Grant(ttl_seconds):
                self._spawn(self._grant(ttl_seconds))
            case KeepAlive(lease):
                self._spawn(self._keep_alive(lease))
            case Read(ranges):
                self._spawn(self._read(ranges))
            case Write(txn):
                self._spawn(self._write(txn))
            case Watch():
                self._watches[effect.generation] = self._spawn(self._watch(effect))
            case Unwatch(generation):
                if (task := self._watches.pop(generation, None)) is not None:
                    task.cancel()
            case Link():
                self._relink(effect)
            case Unlink():
                self._relink(None)
            case Serve(round):
                self._server.serve(round)
            case SendLeaveNotices(leaving):
                self._leaving = leaving
                self._server.announce(leaving)
            case Probe():
                self._spawn(self._probe(effect))
            case Note(text, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", text)
            case _:
                assert_never(effect)

    # -- requests -------------------------------------------------------------------

    async def _grant(self, ttl_seconds: int) -> None:
        sent = self._clock().now
        try:
            lease = await self._client.grant(ttl_seconds)
        except EtcdError as error:
            self._failed(error)
        else:
            self.post(Granted(lease.id, sent + lease.ttl_seconds))

    async def _keep_alive(self, lease: int) -> None:
        sent = self._clock().now
        if self._renewals:  # the previous keep-alive is still pending and may outlast the lease
            self._spawn(self._check_reach())
        self._renewals += 1
        try:
            ttl_seconds = await self._client.keep_alive(lease)
        except LeaseLost:
            self.post(LeaseGone(lease))
        except EtcdError as error:
            log.debug("%s", error)
            await self._check_reach()
        else:
            self.post(KeptAlive(lease, sent + ttl_seconds))
        finally:
            self._renewals -= 1

    async def _read(self, ranges: tuple[Range, ...]) -> None:
        try:
            if len(ranges) == 1:
                found = await self._client.range(ranges[0])
                done = ReadDone(found.revision, found.cluster_id, ((ranges[0], found.kvs),))
            else:
                result = await self._client.txn(Txn((), ranges))
                done = ReadDone(result.revision, result.cluster_id, result.ranges)
        except EtcdError as error:
            self._failed(error)
        else:
            self.post(done)

    async def _write(self, txn: Txn) -> None:
        try:
            result: TxnResult = await self._client.txn(txn)
        except Ambiguous:
            self.post(TxnAmbiguous())
        except LeaseLost:
            for lease in {op.lease for op in txn.success if isinstance(op, Put) and op.lease}:
                self.post(LeaseGone(lease))
            self.post(RequestFailed("the lease of this write is gone"))
        except EtcdError as error:
            self._failed(error)
        else:
            self.post(TxnDone(result))

    def _failed(self, error: EtcdError) -> None:
        """Report a failed request; log one that etcd refuses for its content, which is repeated."""
        refused = str(error) if isinstance(error, InvalidRequest) else ""
        news = refused not in ("", self._refused)
        self._refused = refused or self._refused
        log.log(logging.WARNING if news else logging.DEBUG, "%s", error)
        self.post(RequestFailed(str(error), isinstance(error, Terminal)))

    async def _watch(self, watch: Watch) -> None:
        generation = watch.generation
        opened = False
        try:
            batches = self._client.watch(
                watch.ranges, watch.revision, deletions_only=watch.deletions_only
            )
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    if not opened:
                        opened = True
                        self.post(WatchOpened(generation, batch.revision, batch.cluster_id))
                    if batch.events:
                        self.post(Changed(generation, batch.revision, batch.events))
        except EtcdError as error:
            terminal = not opened and isinstance(error, Terminal)
            self.post(WatchBroken(generation, str(error), terminal))
        finally:
            self._watches.pop(generation, None)

    async def _check_reach(self) -> None:
        """Report `StoreRefused` if all endpoints refuse connections: etcd is down for everyone."""
        if self._checking_reach:
            return
        self._checking_reach = True
        try:
            if await all_refuse(self._endpoints):
                self.post(StoreRefused())
        finally:
            self._checking_reach = False

    # -- peers ----------------------------------------------------------------------

    def _relink(self, link: Link | None) -> None:
        if self._link is not None:
            self._link.cancel()
            self._link = None
        if link is not None:
            identity = self._engine.config.identity
            session = self._engine.session
            delay = LINK_DELAY_SECONDS * (0.5 + self._engine.config.jitter)
            work = dial.hold_link(
                link,
                identity.id,
                session,
                lambda: self._job_key,
                self.post,
                lambda: self._leaving,
                delay,
            )
            self._link = self._spawn(work)

    async def _probe(self, probe: Probe) -> None:
        asker = Peer(self._engine.config.identity.id, self._engine.session)
        self.post(await dial.run_probe(probe, asker, self._job_key))
