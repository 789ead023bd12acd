"""MASTER_ADDR and MASTER_PORT of a round: rank 0 publishes them, anew in every round."""

from __future__ import annotations

import socket
import weakref
from typing import Any

from elasticjob_rendezvous.api import RendezvousStateError, RendezvousStoreInfo
from elasticjob_rendezvous.dynamic.stores import MASTER_ADDR, MASTER_PORT


class HeldPort:
    """A free port that nobody else gets while we hold it.

    Rank 0's store can listen on it nonetheless: it is bound for reuse, and does not listen.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]
        self.close = weakref.finalize(self, self._socket.close)
        """Give the port back; so does whoever drops this."""


def publish(store: Any, address: str, port: int) -> RendezvousStoreInfo:
    """Say where rank 0 will listen. The port goes last: who sees it sees the address too."""
    store.set(MASTER_ADDR, address.encode())
    store.set(MASTER_PORT, str(port).encode())
    return RendezvousStoreInfo(address, port)


def published(store: Any) -> RendezvousStoreInfo | None:
    """What rank 0 published, or None if it has not yet.

    Raises:
        RendezvousStateError: it is no address and port.
    """
    if not store.check([MASTER_ADDR, MASTER_PORT]):
        return None
    address, port = store.get(MASTER_ADDR), store.get(MASTER_PORT)
    try:
        return RendezvousStoreInfo(address.decode(), int(port))
    except ValueError as error:
        raise RendezvousStateError(
            f"rank 0 published no address and port: {address!r}, {port!r}"
        ) from error
