"""Members of a rendezvous on a real etcd, each with an agent that obeys at once.

The agents run no processes: workers "start" when a `Run` arrives and "stop" when a `Stop` does, so
that the tests measure the protocol's own time and outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Self

from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.directives import (
    Directive,
    Finish,
    Idle,
    Left,
    Refused,
    Run,
    Stop,
)
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

DEADLINE_SECONDS = 60.0
JOB_KEY = b"the key of this test's job"
_ports = itertools.count(20_000)

FAST = RendezvousParams(
    1,
    4,
    last_call_seconds=20.0,
    keep_alive_seconds=2.0,
    settle_seconds=0.5,
    confirm_seconds=2.0,
    stop_grace_seconds=1.0,
)


@dataclass
class Node:
    """Member and its obedient agent."""

    settings: MemberSettings
    member: RendezvousMember = field(init=False)
    local: Local = field(default_factory=lambda: Local(ready=True, master_port=next(_ports)))
    seen: list[Directive] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> Self:
        self.member = await self._stack.enter_async_context(RendezvousMember(self.settings))
        self.member.report(self.local)
        self._task = asyncio.create_task(self._obey())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.crash()

    async def crash(self) -> None:
        """Disappear without notice: all connections close, the key and the lease stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._stack.aclose()

    def report(self, **changes: object) -> None:
        self.local = replace(self.local, **changes)  # type: ignore[arg-type]
        self.member.report(self.local)

    async def _obey(self) -> None:
        async for directive in self.member.directives():
            self.seen.append(directive)
            match directive:
                case Run(roster) if self.local.round < roster.number:
                    self.started.append(roster.number)
                    self.report(
                        workers=Workers.RUNNING,
                        round=roster.number,
                        failure=None,
                        done=False,
                        start_ms=1,
                    )
                case Stop():
                    self.report(workers=Workers.NONE, master_port=next(_ports))
                case Finish() if self.local.workers is not Workers.NONE:
                    self.report(workers=Workers.NONE)
                case Left() | Refused() | Idle() | Run() | Finish():
                    pass

    def fail(self, kind: FailureClass) -> None:
        """Fail the worker of the current round."""
        identity = self.settings.config.identity
        failure = Failure(
            self.local.round, identity.id, identity.name, 0, 0, kind, 1, 1, None, "it broke"
        )
        self.report(failure=failure, workers=Workers.NONE, master_port=next(_ports))

    @property
    def running(self) -> Roster | None:
        """Roster of the workers that run here now, or None."""
        directive = self.member.directive
        if isinstance(directive, Run) and self.local.workers is Workers.RUNNING:
            return directive.roster
        return None

    @property
    def round(self) -> Round | None:
        at = self.member.view.round
        return at.record if at else None


def settings(
    url: str, prefix: str, name: str, bounds: RendezvousParams | None = FAST
) -> MemberSettings:
    identity = Identity(id=f"id-{name}", name=name, address="127.0.0.1", agent_port=0)
    config = Config(
        prefix=prefix + "/" if not prefix.endswith("/") else prefix,
        identity=identity,
        session_nonce=f"s-{name}-{time.monotonic_ns()}",
        bounds=bounds,
        keep_alive_seconds=2.0,
    )
    return MemberSettings((url,), config, JOB_KEY, bind_address="127.0.0.1")


@contextlib.asynccontextmanager
async def gang(
    url: str, prefix: str, names: list[str], bounds: RendezvousParams = FAST
) -> AsyncIterator[list[Node]]:
    """Yield started nodes; `expected` is set to their number."""
    bounds = replace(bounds, expected=len(names))
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Node(settings(url, prefix, name, bounds)))
            for name in names
        ]


async def until(
    condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS
) -> float:
    """Wait for a condition; return the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def together(nodes: list[Node], after: int = 0) -> bool:
    """Return True if exactly these nodes run one round with a number above `after`."""
    rosters = [node.running for node in nodes]
    if any(roster is None or roster.number <= after for roster in rosters):
        return False
    first = rosters[0]
    assert first is not None
    names = {node.settings.config.identity.id for node in nodes}
    return all(roster == first for roster in rosters) and names == {s.id for s in first.seats}
