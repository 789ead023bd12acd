"""Rendezvous handlers for agents, by backend name, and the v3 rendezvous as a handler.

With a v3 handler an agent runs the member itself and follows its directives: it gets a
node's loss or failure at once, and the restart budget is job-wide. The blocking methods of
torch's API delegate to an `EtcdV3RendezvousHandler`, created on the first call. The other
backends are imported lazily.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND, member_settings, timeout_seconds
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.text import echoed


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


def create_native_handler(parameters: RendezvousParameters) -> DirectedHandler:
    """Create a v3 handler for an agent from torch's parameters; see `etcd.parameters`.

    Raises:
        ValueError: a setting is malformed; the message names it.
    """
    return DirectedHandler(
        member_settings(parameters), parameters.run_id, timeout_seconds(parameters)
    )


BACKENDS = ("elasticjob", "etcd", "etcd-v2", "c10d")


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return ElasticJob's handler for `parameters.backend`: v3, or any of torch's backend names.

    Raises:
        ValueError: unknown backend, or a malformed setting.
        RendezvousConnectionError: the backend cannot be reached.
        ImportError: its extra (`etcd-v2`, `torch`) is not installed.
    """
    match parameters.backend:
        case "elasticjob":
            return create_native_handler(parameters)
        case "etcd":
            from elasticjob_rendezvous import etcd_v2

            return etcd_v2.create_rdzv_handler(parameters)
        case "etcd-v2":
            from elasticjob_rendezvous.dynamic import etcd_backend

            return etcd_backend.create_rdzv_handler(parameters)
        case "c10d":
            from elasticjob_rendezvous import c10d

            return c10d.create_rdzv_handler(parameters)
    known = ", ".join(BACKENDS)
    raise ValueError(f"unknown rendezvous backend {echoed(parameters.backend)}: known are {known}")
