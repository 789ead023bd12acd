"""Rendezvous API of torch's elastic modules, without a dependency on torch.

Names and behaviour follow `torch.distributed.elastic.rendezvous` (torch 2.13):
`RendezvousHandler`, `RendezvousInfo`, `RendezvousStoreInfo`, `RendezvousParameters` and
the errors.
"""

from __future__ import annotations

import contextlib
import re
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.protocol.text import echoed


class RendezvousError(Exception):
    """Base class of all rendezvous errors."""


class RendezvousTimeoutError(RendezvousError):
    """Rendezvous that did not complete within its timeout."""


class RendezvousClosedError(RendezvousError):
    """Closed rendezvous: the job has ended, with success or failure."""


class RendezvousConnectionError(RendezvousError):
    """Backend that is unreachable or refuses to serve this client."""


class RendezvousUnsupportedError(RendezvousConnectionError):
    """Backend of an unsupported kind, or unusable in this process; retrying does not help."""


class RendezvousStateError(RendezvousError):
    """Stored state that is malformed or contradicts this member's settings."""


class RendezvousGracefulExitError(RendezvousError):
    """Deliberate exit: this member left while it waited, or is no longer needed."""


@dataclass(frozen=True, slots=True)
class RendezvousStoreInfo:
    """Address and port of the bootstrap store of torch, which rank 0 of a round hosts.

    `MASTER_ADDR` and `MASTER_PORT` change in every round.
    """

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """Publish address and port through a store as rank 0; read them as any other rank.

        Args:
            store: any object with `set` and `get`.
            local_addr: this node's address; detected if None.
            server_port: port of a store that already listens; by default a free local port.

        Raises:
            Exception: the store's own error if rank 0 publishes nothing within its timeout.
            ValueError: the value in the store is not a port.
        """
        if rank != 0:
            address = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY)
            port = store.get(RendezvousStoreInfo.MASTER_PORT_KEY)
            return RendezvousStoreInfo(address.decode(), int(port))
        own = local_addr or socket.getfqdn()
        with reserved_port() as held:
            number = server_port or int(held.getsockname()[1])
            # Write the port last: a reader that sees the port also sees the address.
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, own.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(number).encode())
        return RendezvousStoreInfo(own, number)


def reserved_port() -> socket.socket:
    """Return a socket that reserves a free port, on IPv6 and IPv4 if the host has both.

    The socket does not listen, and a store can listen at the port beside it.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return _bound(socket.AF_INET6)
    return _bound(socket.AF_INET)


def _bound(family: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
    except OSError:
        held.close()
        raise
    return held


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Result of one rendezvous.

    Args:
        store: key-value store of the round, if the backend provides one.
        rank: this node's rank among the nodes, 0 … world_size - 1.
        world_size: number of nodes (agents, not workers), as in torch.
        bootstrap_store_info: address of the bootstrap store for torch's process group.
        round: number of the round; increases with every rendezvous of the job.
    """

    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo
    round: int = 0


class RendezvousHandler(ABC):
    """Interface between an elastic agent and a rendezvous backend. Methods are thread-safe."""

    @abstractmethod
    def get_backend(self) -> str:
        """Return the backend's registered name."""

    @property
    def use_agent_store(self) -> bool:
        """True if the agent hosts the store at MASTER_ADDR:MASTER_PORT; always False here."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has a rank in a round.

        The call implies that no worker of an earlier round still runs on this node.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: no round formed within the timeout.
            RendezvousConnectionError: the backend is unreachable.
            RendezvousStateError: the state is malformed or contradicts this node's settings.
            RendezvousGracefulExitError: `shutdown` was called during the wait.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Return True if this node knows that the rendezvous is closed."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for all members."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait for the next round; above 0, restart the workers."""

    @abstractmethod
    def get_run_id(self) -> str:
        """Return the id of the job's run."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Leave the rendezvous and free all resources; return True on success."""


_TRUE = frozenset({"1", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "f", "false", "n", "no"})


class RendezvousParameters:
    """Parameters from which a backend creates a rendezvous handler.

    Args:
        backend: name of the backend.
        endpoint: address of the backend, usually `host:port`.
        run_id: id of the run.
        min_nodes, max_nodes: minimum and maximum number of nodes.
        local_addr: this node's address; detected if None.
        kwargs: further settings of the backend, as strings or values.

    Raises:
        ValueError: the backend name is empty, or min_nodes and max_nodes are invalid.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise ValueError("the rendezvous backend must be named")
        if min_nodes < 1:
            raise ValueError(f"min_nodes must be at least 1, not {min_nodes}")
        if max_nodes < min_nodes:
            raise ValueError(f"max_nodes must be at least min_nodes ({min_nodes}), not {max_nodes}")
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        """Return a backend setting, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a setting as a boolean; raise ValueError if it is not one."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).lower() if isinstance(value, str | int) else ""
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError(
            f"the rendezvous setting {echoed(key)} must be true or false, not {echoed(value)}"
        )

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return a setting as an integer; raise ValueError if it is not one."""
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if value is None or isinstance(value, int):
            return value
        if re.fullmatch(r"\s*[+-]?\d+\s*", str(value)):
            return int(value)
        raise ValueError(
            f"the rendezvous setting {echoed(key)} must be a whole number, not {echoed(value)}"
        )

    def get_as_float(self, key: str, default: float | None = None) -> float | None:
        """Return a setting as a number; raise ValueError if it is not one."""
        value = self.get(key, default)
        if value is None or isinstance(value, int | float):
            return value
        try:
            return float(value)
        except ValueError as error:
            raise ValueError(
                f"the rendezvous setting {echoed(key)} must be a number, not {echoed(value)}"
            ) from error
