"""Ports of the agent: the settings of its node, its rendezvous, and hooks for an embedder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from elasticjob_agent.core.events import Event
from elasticjob_agent.core.state import State
from elasticjob_agent.settings import LogSettings, WarmStart
from elasticjob_agent.worker_runtime import StartWorkers
from elasticjob_rendezvous.protocol.directives import Directive
from elasticjob_rendezvous.protocol.worker_group import Local

StateReader: TypeAlias = Callable[[], State]
"""Returns the agent's state after its last step; callable in any thread."""


class NodeSettings(Protocol):
    """Settings of a node that the agent needs; `settings.AgentSettings` is a superset."""

    @property
    def run_id(self) -> str: ...
    @property
    def member(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def slots(self) -> int | None: ...
    @property
    def logs(self) -> LogSettings: ...
    @property
    def stop_grace_seconds(self) -> float: ...
    @property
    def hang_seconds(self) -> float: ...
    @property
    def announce(self) -> bool: ...
    @property
    def warm_start(self) -> WarmStart | None: ...


class Rendezvous(Protocol):
    """Rendezvous port of the agent.

    Implementations: `etcd.member.RendezvousMember` and
    `polling.handler_rendezvous.HandlerRendezvous`.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def report(self, local: Local) -> None:
        """Report the full state of this node. Does not block."""
        ...

    def directives(self) -> AsyncIterator[Directive]:
        """Yield the current directive, then each change."""
        ...

    @property
    def live_until(self) -> float | None:
        """Workers' deadline by current knowledge, on the monotonic clock; None for no deadline."""
        ...

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        """Call `renewed` whenever `live_until` may be later although no lease was renewed."""
        ...

    @property
    def registered(self) -> bool:
        """True if this node's key exists in etcd, by current knowledge."""
        ...


class AgentHooks:
    """Agent hooks: observe each step, and change the order to start workers. Default: no-ops."""

    def adjust_start(self, order: StartWorkers) -> StartWorkers:
        """Return the order to pass to the worker runtime."""
        return order

    def observed(self, state: State, event: Event) -> None:
        """Observe the state after a step, and the event of that step."""
