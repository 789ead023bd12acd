"""MASTER_ADDR and MASTER_PORT of a round, which rank 0 publishes in every round."""

from __future__ import annotations

import socket
import weakref
from typing import Any

from elasticjob_rendezvous.api import RendezvousStateError, RendezvousStoreInfo
from elasticjob_rendezvous.dynamic.stores import MASTER_ADDR, MASTER_PORT


class HeldPort:
    """Free port, reserved while this object exists.

    Rank 0's store can still listen on it: the port is bound for reuse, without listening.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]
        self.close = weakref.finalize(self, self._socket.close)
        """Function that releases the port, as does garbage collection."""


def publish(store: Any, address: str, port: int) -> RendezvousStoreInfo:
    """Publish rank 0's address, then its port: a reader of the port also sees the address."""
    store.set(MASTER_ADDR, address.encode())
    store.set(MASTER_PORT, str(port).encode())
    return RendezvousStoreInfo(address, port)


def published(store: Any) -> RendezvousStoreInfo | None:
    """Return the address and port published by rank 0, or None if there are none yet.

    Raises:
        RendezvousStateError: the published values are not an address and a port.
    """
    if not store.check([MASTER_ADDR, MASTER_PORT]):
        return None
    address, port = store.get(MASTER_ADDR), store.get(MASTER_PORT)
    try:
        return RendezvousStoreInfo(address.decode(), int(port))
    except ValueError as error:
        raise RendezvousStateError(
            f"rank 0 published an invalid address or port: {address!r}, {port!r}"
        ) from error
