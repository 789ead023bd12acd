"""What an agent is put into: its node's settings, its rendezvous, and who looks on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self

from elasticjob_agent.core.model import Event, State
from elasticjob_agent.hands import StartWorkers
from elasticjob_agent.settings import LogSettings, WarmStart
from elasticjob_rendezvous.core.directives import Directive
from elasticjob_rendezvous.core.local import Local


class NodeSettings(Protocol):
    """What an agent must be told of its node. `settings.AgentSettings` is that and more."""

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
    def slots(self) -> int: ...
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
    """What the agent needs of the rendezvous.

    `etcd.member.RendezvousMember` is it, and `api.following.HandlerRendezvous`.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def tell(self, local: Local) -> None:
        """The whole truth of this node; does not block."""
        ...

    def directives(self) -> AsyncIterator[Directive]:
        """The current directive, then each change."""
        ...

    @property
    def live_until(self) -> float | None:
        """Until when workers may live by what is known now, on the monotonic clock."""
        ...

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        """Have `renewed` called when `live_until` may have grown though no lease was renewed."""
        ...

    @property
    def registered(self) -> bool:
        """Whether our key stands in etcd, as far as we know."""
        ...


class Attendant:
    """Looks on, and may change how workers are started. This one does neither."""

    def dressed(self, order: StartWorkers) -> StartWorkers:
        """The order as it is to be given to the hands."""
        return order

    def observed(self, state: State, event: Event) -> None:
        """The state after each step, and what it took in."""
