"""The rendezvous API that users of torch's elastic modules know, without torch.

Names and behaviour follow `torch.distributed.elastic.rendezvous` (torch 2.13):
`RendezvousHandler`, `RendezvousInfo`, `RendezvousStoreInfo`, `RendezvousParameters` and
the errors.
"""

from __future__ import annotations

import contextlib
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.core.typed import echoed


class RendezvousError(Exception):
    """Base of all rendezvous errors."""


class RendezvousTimeoutError(RendezvousError):
    """No rendezvous came about in time."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous is closed: the job has ended, for good or ill."""


class RendezvousConnectionError(RendezvousError):
    """The backend can't be reached or does not serve us."""


class RendezvousUnsupportedError(RendezvousConnectionError):
    """It is of a kind that can't serve us, or not in this process: to try again is in vain."""


class RendezvousStateError(RendezvousError):
    """The stored state is malformed, or contradicts what this member was told."""


class RendezvousGracefulExitError(RendezvousError):
    """This member left on purpose while it waited, or is not needed any more."""


@dataclass(frozen=True, slots=True)
class RendezvousStoreInfo:
    """Where rank 0 of a round hosts torch's bootstrap store.

    `MASTER_ADDR` and `MASTER_PORT` are new in every round.
    """

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(
        rank: int, store: Any, local_addr: str | None, server_port: int | None = None
    ) -> RendezvousStoreInfo:
        """As rank 0 tell the others through a store, as another rank wait to be told.

        Args:
            store: needs no more than `set` and `get`.
            local_addr: this node's address, if it is not to be found out.
            server_port: where a store listens already; else a port that is free here.

        Raises:
            Exception: whatever the store raises when rank 0 is silent for its timeout.
            ValueError: what stands in the store is no port.
        """
        if rank != 0:
            address = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY)
            port = store.get(RendezvousStoreInfo.MASTER_PORT_KEY)
            return RendezvousStoreInfo(address.decode(), int(port))
        own = local_addr or socket.getfqdn()
        with _free_port() as free:
            number = server_port or free
            # The port goes last: who sees it sees the address too.
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, own.encode())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(number).encode())
        return RendezvousStoreInfo(own, number)


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else gets inside the block."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """The outcome of one rendezvous.

    Args:
        store: a key-value store of the round, where the backend offers one.
        rank: this node's place among the nodes, 0 … world_size - 1.
        world_size: the number of nodes (of agents, not of workers), as in torch.
        bootstrap_store_info: for torch's process group.
        round: number of the round; grows with every rendezvous of the job.
    """

    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: RendezvousStoreInfo
    round: int = 0


class RendezvousHandler(ABC):
    """What an elastic agent needs of a rendezvous. Methods may be called from any thread."""

    @abstractmethod
    def get_backend(self) -> str:
        """The backend's registered name."""

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent hosts the store at MASTER_ADDR:MASTER_PORT. It does not."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has a place in a round.

        Calling it says that no worker of an earlier round runs here any more.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: no round came about in time.
            RendezvousConnectionError: the backend can't be reached.
            RendezvousStateError: the state is malformed or contradicts us.
            RendezvousGracefulExitError: `shutdown` was called meanwhile.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the rendezvous is closed, as far as is known here."""

    @abstractmethod
    def set_closed(self) -> None:
        """Close the rendezvous for all members."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait for a next round; more than 0 means: restart the workers."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The id of the job's run."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Leave and free all resources; True when that went well."""


_TRUE = frozenset({"1", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "f", "false", "n", "no"})


class RendezvousParameters:
    """What a handler is made from.

    Args:
        backend: name of the backend.
        endpoint: where it is, usually `host:port`.
        run_id: id of the run.
        min_nodes, max_nodes: how many nodes may take part.
        local_addr: this node's address, if it is not to be found out.
        kwargs: further settings of the backend, as strings or values.

    Raises:
        ValueError: a name is empty or the sizes contradict each other.
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
        """A further setting, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """A setting as a truth value; raises ValueError for anything else."""
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
        """A setting as a whole number; raises ValueError for anything else."""
        value = self.get(key, default)
        if value is None or isinstance(value, int):
            return value
        if re.fullmatch(r"\s*[+-]?\d+\s*", str(value)):
            return int(value)
        raise ValueError(
            f"the rendezvous setting {echoed(key)} must be a whole number, not {echoed(value)}"
        )

    def get_as_float(self, key: str, default: float | None = None) -> float | None:
        """A setting as a number; raises ValueError for anything else."""
        value = self.get(key, default)
        if value is None or isinstance(value, int | float):
            return value
        try:
            return float(value)
        except ValueError as error:
            raise ValueError(
                f"the rendezvous setting {echoed(key)} must be a number, not {echoed(value)}"
            ) from error
