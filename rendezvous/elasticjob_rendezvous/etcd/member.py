"""Member of a rendezvous over etcd v3: the interface for its agent."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import cache
from types import TracebackType
from typing import Self

from pyetcd.etcdrpc import kv_pb2, rpc_pb2

from elasticjob_rendezvous.etcd import wire
from elasticjob_rendezvous.etcd.client import Client, LoginFiles, Tls
from elasticjob_rendezvous.etcd.driver import Driver
from elasticjob_rendezvous.etcd.probe import STORE, EtcdProbe
from elasticjob_rendezvous.etcd.shared_key import KEY_BYTES, follow_shared_key
from elasticjob_rendezvous.links.server import PeerServer
from elasticjob_rendezvous.protocol.config import Config
from elasticjob_rendezvous.protocol.directives import Directive
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import Close, LocalChanged, StoreChanged
from elasticjob_rendezvous.protocol.kv import Deleted, KeyValue, Range, Txn, TxnResult, WatchEvent
from elasticjob_rendezvous.protocol.records.members import Outcome
from elasticjob_rendezvous.protocol.rehearsal import rehearse as play
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble, endpoints_text
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from elasticjob_rendezvous.store_monitor import StoreMonitor


@cache
def rehearse() -> bool:
    """Run the rehearsal once per process; return True if it completed. Costs a few ms of CPU."""
    return play(answered, seen)


def _message(kv: KeyValue) -> wire.Message:
    return kv_pb2.KeyValue(
        key=kv.key.encode(),
        value=kv.value,
        create_revision=kv.create_revision,
        mod_revision=kv.mod_revision,
        lease=kv.lease,
    )


def answered(txn: Txn, result: TxnResult) -> TxnResult:
    """Encode and decode a transaction and its result as the client does, for the rehearsal."""
    rpc_pb2.TxnRequest.FromString(wire.txn_request(txn).SerializeToString())
    found = iter(result.ranges)
    answers = []
    for op in txn.success if result.succeeded else txn.failure:
        answer = rpc_pb2.ResponseOp()
        if isinstance(op, Range):
            answer.response_range.kvs.extend(map(_message, next(found)[1]))
        answers.append(answer)
    reply = rpc_pb2.TxnResponse(succeeded=result.succeeded, responses=answers)
    reply.header.revision = result.revision
    reply.header.cluster_id = result.cluster_id
    return wire.txn_result(txn, rpc_pb2.TxnResponse.FromString(reply.SerializeToString()))


def seen(events: tuple[WatchEvent, ...]) -> tuple[WatchEvent, ...]:
    """Encode and decode watch events as the client does, for the rehearsal."""
    reply = rpc_pb2.WatchResponse()
    for event in events:
        if isinstance(event, Deleted):
            gone = kv_pb2.KeyValue(key=event.key.encode(), mod_revision=event.mod_revision)
            reply.events.add(type=kv_pb2.Event.DELETE, kv=gone)
        else:
            reply.events.add(kv=_message(event))
    return wire.watch_events(rpc_pb2.WatchResponse.FromString(reply.SerializeToString()).events)


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Connection settings for etcd and the other members.

    Args:
        endpoints: etcd endpoints, `host:port` or URLs.
        config: see `protocol.config`; the member fills in `identity.agent_port`.
        job_key: secret shared by the agents of this job; with `key_in_etcd` it may be empty, and
            is then unknown until etcd answers.
        key_in_etcd: True if that secret is kept in etcd, see `shared_key`.
        bind_address: bind address of the peer server.
        login_files: files with the present user and password; None if they do not change.
    """

    endpoints: tuple[str, ...]
    config: Config
    job_key: bytes
    tls: Tls | None = None
    user: str | None = None
    password: str | None = None
    bind_address: str = "0.0.0.0"
    key_in_etcd: bool = False
    login_files: LoginFiles | None = None


class RendezvousMember:
    """Async context manager that runs the protocol in the background."""

    def __init__(self, settings: MemberSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._driver: Driver | None = None
        self._changed = asyncio.Event()
        self._news: tuple[bool, Directive] | None = None
        self._run: asyncio.Task[None] | None = None
        self._monitor: StoreMonitor | None = None
        self._stack = contextlib.AsyncExitStack()
        self._renewed: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        settings = self._settings
        identity = settings.config.identity
        job_key = settings.job_key or secrets.token_bytes(KEY_BYTES)  # no peer has a random one
        server = PeerServer(
            identity.id,
            job_key,
            lambda event: self._post(event),
            settings.bind_address,
            self._workers,
            lambda: self.live_until,
            lambda: None if self._engine is None else self._engine.evidence_until,
            lambda: "" if self._engine is None else self._engine.session,
        )
        async with contextlib.AsyncExitStack() as stack:
            port = await server.start()
            stack.push_async_callback(server.stop)
            config = replace(settings.config, identity=replace(identity, agent_port=port))
            client = Client(
                settings.endpoints,
                tls=settings.tls,
                user=settings.user,
                password=settings.password,
                login_files=settings.login_files,
            )
            await stack.enter_async_context(client)
            self._engine = Engine(config)
            self._driver = Driver(
                self._engine,
                client,
                settings.endpoints,
                server,
                job_key,
                self._stepped,
            )
            if settings.key_in_etcd:
                work = follow_shared_key(client, config.prefix, self._driver.use_key)
                following = asyncio.create_task(work, name="shared-key")
                stack.push_async_callback(_cancelled, following)
            self._run = asyncio.create_task(self._driver.run(), name="rendezvous")
            self._run.add_done_callback(lambda _: self._changed.set())
            stack.push_async_callback(_cancelled, self._run)
            probe = EtcdProbe(client, config.prefix, self._members)
            self._monitor = StoreMonitor(
                STORE,
                endpoints_text(settings.endpoints),
                probe,
                lambda trouble: self._post(StoreChanged(trouble)),
                pause=lambda: probe.pause_seconds,
                written_at=lambda: client.transport.written_at,
            )
            watching = asyncio.create_task(self._monitor.run(), name="store-monitor")
            stack.push_async_callback(_cancelled, watching)
            self._stack = stack.pop_all()
        await asyncio.sleep(0)  # start the first connection, which proceeds during `rehearse`
        rehearse()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def _post(self, event: object) -> None:
        if self._driver is not None:
            self._driver.post(event)  # type: ignore[arg-type]

    def _workers(self) -> int:
        """Return 1 if workers may run, also in a round just handed to the agent; otherwise 0."""
        return int(self._engine is not None and self._engine.local.workers is not Workers.NONE)

    def _members(self) -> int:
        """Return the known number of members of the current round, at least 1."""
        found = None if self._engine is None else self._engine.view.round
        return 1 if found is None else max(1, found.record.nodes)

    def report(self, local: Local) -> None:
        """Report the complete state of this node; never blocks."""
        self._post(LocalChanged(local))

    def close(self, outcome: Outcome) -> None:
        """Request that the rendezvous be closed for all members."""
        self._post(Close(outcome))

    async def directives(self) -> AsyncIterator[Directive]:
        """Yield the current directive, then each change. Raise the driver's error if it failed."""
        last: Directive | None = None
        while True:
            if self.directive != last:
                assert self._engine is not None, "enter the context first"
                last = self._engine.hand_over()
                yield last
                continue
            if self._run is not None and self._run.done():
                self._run.result()
                return
            self._changed.clear()
            await self._changed.wait()

    @property
    def directive(self) -> Directive:
        assert self._engine is not None, "enter the context first"
        return self._engine.directive

    async def wait_connected(self, seconds: float) -> bool:
        """Wait for the first answer of etcd; return False after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._engine is None or not self._engine.watches.ready:
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    @property
    def registered(self) -> bool:
        """True if this member's key is known to exist in etcd."""
        engine = self._engine
        if engine is None:
            return False
        return engine.session in engine.view.sessions.get(engine.config.identity.id, {})

    @property
    def trouble(self) -> StoreTrouble | None:
        """Known trouble with etcd; None while it is usable."""
        return None if self._monitor is None else self._monitor.trouble

    @property
    def live_until(self) -> float | None:
        """Current self-fencing deadline of the workers, on the monotonic clock."""
        return None if self._engine is None else self._engine.live_until

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        """Set the callback for a `live_until` that may have grown by evidence, not by a lease."""
        self._renewed = renewed

    @property
    def coordinates(self) -> bool:
        """True while this member is the coordinator."""
        return self._engine is not None and self._engine.coordinator.active

    @property
    def linked(self) -> bool:
        """True while the link to the coordinator is up."""
        return self._engine is not None and self._engine.leader_link.evidence is not None

    @property
    def view(self) -> View:
        """Known state of the job; read-only."""
        assert self._engine is not None, "enter the context first"
        return self._engine.view

    def _stepped(self) -> None:
        """Wake waiting tasks if the directive or the readiness of the watches has changed."""
        assert self._engine is not None
        if self._renewed is not None and not self._engine.self_fencing.backed(time.monotonic()):
            self._renewed()
        news = (self._engine.watches.ready, self._engine.directive)
        if news != self._news:
            self._news = news
            self._changed.set()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
