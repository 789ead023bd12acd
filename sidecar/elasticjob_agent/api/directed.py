"""v3 rendezvous as a handler: an agent runs the member itself and follows its directives.

The agent thus learns of a node's loss or failure at once, and the restart budget is job-wide. The
blocking methods of torch's API delegate to an `EtcdV3RendezvousHandler`, created on the first call.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
from elasticjob_rendezvous.core.config import Identity
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND, member_settings, timeout_seconds


class DirectedHandler(RendezvousHandler):
    """Handler of a v3 rendezvous. The constructor opens no connection."""

    def __init__(
        self, settings: MemberSettings, run_id: str, timeout_seconds: float = 600.0
    ) -> None:
        self._settings = settings
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._blocking: EtcdV3RendezvousHandler | None = None

    @staticmethod
    def of(handler: EtcdV3RendezvousHandler) -> DirectedHandler:
        """Convert a handler, which is shut down: two handlers cannot be the same member."""
        handler.shutdown()
        return DirectedHandler(handler.settings, handler.get_run_id())

    @property
    def identity(self) -> Identity:
        """Identity of this member."""
        return self._settings.config.identity

    def member(
        self, slots: int, role: str, launcher_port: int, max_restarts: int
    ) -> RendezvousMember:
        """Create the member; the caller runs it.

        `max_restarts` is the restart budget if no operator writes the bounds.
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
    """Create a v3 handler for an agent from torch's parameters; see `etcd.parameters`.

    Raises:
        ValueError: a setting is malformed; the message names it.
    """
    return DirectedHandler(
        member_settings(parameters), parameters.run_id, timeout_seconds(parameters)
    )
