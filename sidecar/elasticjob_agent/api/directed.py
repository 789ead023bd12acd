"""The v3 rendezvous as a handler: an agent takes its member, and lives by directives.

So a node's loss or failure reaches the agent at once, and the budget is the job's. Whoever
calls the handler's blocking methods instead gets `EtcdV3RendezvousHandler`, made on the
first call.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
from elasticjob_rendezvous.core.config import Identity
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND, member_settings, timeout_seconds


class DirectedHandler(RendezvousHandler):
    """A place in a v3 rendezvous. Connects to nothing when it is made."""

    def __init__(
        self, settings: MemberSettings, run_id: str, timeout_seconds: float = 600.0
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._blocking: EtcdV3RendezvousHandler | None = None

    @staticmethod
    def of(handler: EtcdV3RendezvousHandler) -> DirectedHandler:
        """The same place for an agent. The handler is shut down: two can't be one member."""
        handler.shutdown()
        return DirectedHandler(handler.settings, handler.get_run_id())

    @property
    def identity(self) -> Identity:
        """Who this member is."""
        return self._settings.config.identity

    def member(
        self, slots: int, role: str, launcher_port: int, max_restarts: int
    ) -> RendezvousMember:
        """The member, to be run by the caller.

        `max_restarts` is the budget where no operator writes the bounds.
        """
        config = self._settings.config
        identity = replace(config.identity, slots=slots, role=role, launcher_port=launcher_port)
        bounds = config.bounds and replace(config.bounds, max_restarts=max_restarts)
        config = replace(config, identity=identity, bounds=bounds)
        return RendezvousMember(replace(self._settings, config=config))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return self._made().next_rendezvous()

    def is_closed(self) -> bool:
        return self._made().is_closed()

    def set_closed(self) -> None:
        self._made().set_closed()

    def num_nodes_waiting(self) -> int:
        return self._made().num_nodes_waiting()

    def shutdown(self) -> bool:
        made, self._blocking = self._blocking, None
        return made is None or made.shutdown()

    def _made(self) -> EtcdV3RendezvousHandler:
        if self._blocking is None:
            self._blocking = EtcdV3RendezvousHandler(
                self._settings, self._run_id, self._timeout_seconds
            )
        return self._blocking


def create_handler(parameters: RendezvousParameters) -> DirectedHandler:
    """A v3 handler for an agent, from torch's parameters; see `etcd.parameters.member_settings`.

    Raises:
        ValueError: a setting is malformed; it names it.
    """
    return DirectedHandler(
        member_settings(parameters), parameters.run_id, timeout_seconds(parameters)
    )
