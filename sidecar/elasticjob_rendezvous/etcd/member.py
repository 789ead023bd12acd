"""One member of a rendezvous over etcd v3, as its agent uses it.

The agent tells its whole truth (`Local`) whenever it changes and obeys the current
`Directive`; everything between the two is the engine's and the driver's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from elasticjob_rendezvous.core.config import Config
from elasticjob_rendezvous.core.directives import Directive
from elasticjob_rendezvous.core.engine import Engine
from elasticjob_rendezvous.core.events import Close, LocalChanged, StoreChanged
from elasticjob_rendezvous.core.local import Local as Local
from elasticjob_rendezvous.core.local import Workers
from elasticjob_rendezvous.core.records import Outcome
from elasticjob_rendezvous.core.store_trouble import StoreTrouble, endpoints_text
from elasticjob_rendezvous.core.view import View
from elasticjob_rendezvous.etcd.client import Client, Tls
from elasticjob_rendezvous.etcd.driver import Driver
from elasticjob_rendezvous.etcd.probe import STORE, EtcdProbe
from elasticjob_rendezvous.etcd.rehearsal import rehearse
from elasticjob_rendezvous.peers.server import PeerServer
from elasticjob_rendezvous.store_monitor import StoreMonitor


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How to reach etcd and the other members.

    Args:
        endpoints: of etcd, `host:port` or URLs.
        config: see `core.config`; `identity.agent_port` is filled in here.
        job_key: the secret that the agents of this job share.
        bind_address: where our listener for peers binds.
    """

    endpoints: tuple[str, ...]
    config: Config
    job_key: bytes
    tls: Tls | None = None
    user: str | None = None
    password: str | None = None
    bind_address: str = "0.0.0.0"


class RendezvousMember:
    """An async context manager: inside it the protocol runs in the background."""

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
        server = PeerServer(
            identity.id,
            settings.job_key,
            lambda event: self._post(event),
            settings.bind_address,
            self._workers,
            lambda: self.live_until,
            lambda: None if self._engine is None else self._engine.vouched_until,
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
            )
            await stack.enter_async_context(client)
            self._engine = Engine(config)
            self._driver = Driver(
                self._engine,
                client,
                settings.endpoints,
                server,
                settings.job_key,
                self._stepped,
            )
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
        await asyncio.sleep(0)  # the first connection is being made meanwhile
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
        """At least one, where any may run: a round that was handed over counts as well."""
        return int(self._engine is not None and self._engine.local.workers is not Workers.NONE)

    def _members(self) -> int:
        """Number of members of the current round, as far as known here."""
        found = None if self._engine is None else self._engine.view.round
        return 1 if found is None else max(1, found.record.nodes)

    def tell(self, local: Local) -> None:
        """Say the whole truth about this node; never blocks."""
        self._post(LocalChanged(local))

    def close(self, outcome: Outcome) -> None:
        """Ask for the rendezvous to be closed for all members."""
        self._post(Close(outcome))

    async def directives(self) -> AsyncIterator[Directive]:
        """The current directive, then each change. Raises what the driver died of."""
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
        """Wait until etcd has answered for the first time; False after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._engine is None or not self._engine.watches.ready:
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    @property
    def registered(self) -> bool:
        """Whether our key stands in etcd, as far as we know."""
        engine = self._engine
        if engine is None:
            return False
        return engine.session in engine.view.sessions.get(engine.config.identity.id, {})

    @property
    def trouble(self) -> StoreTrouble | None:
        """Trouble with etcd; None while it can be used."""
        return None if self._monitor is None else self._monitor.trouble

    @property
    def live_until(self) -> float | None:
        """Until when workers may live by what is known now, on the monotonic clock."""
        return None if self._engine is None else self._engine.live_until

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        """Have `renewed` called when `live_until` may have grown though no lease was renewed."""
        self._renewed = renewed

    @property
    def coordinates(self) -> bool:
        """Whether this member coordinates at present."""
        return self._engine is not None and self._engine.coordinator.active

    @property
    def linked(self) -> bool:
        """Whether the link to the coordinator stands."""
        return self._engine is not None and self._engine.leadership.heard is not None

    @property
    def view(self) -> View:
        """What is known of the job; only to be read."""
        assert self._engine is not None, "enter the context first"
        return self._engine.view

    def _stepped(self) -> None:
        """Wake those who wait, but only if there is something new for them."""
        assert self._engine is not None
        if self._renewed is not None and not self._engine.safety.backed(time.monotonic()):
            self._renewed()
        news = (self._engine.watches.ready, self._engine.directive)
        if news != self._news:
            self._news = news
            self._changed.set()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
