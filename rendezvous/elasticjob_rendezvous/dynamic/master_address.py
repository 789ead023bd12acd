"""Address and port of rank 0 in each round: published by rank 0, tracked by every node."""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    reserved_port,
)
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, RankAssignment, is_torch_node
from elasticjob_rendezvous.dynamic.stores import MASTER_ADDR, MASTER_PORT

log = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
"""Wait for a torch node of rank 0 to publish; later assume that it did so in an earlier round."""
AWAITED_SECONDS = 30.0
"""Wait for a store that accepts connections and does not answer: less than that of other ranks."""
ABSENT_SECONDS = 10.0
"""The same, for the store of an agent outside the round."""
PROBE_SECONDS = 3.0
LOOK_BACK_ROUNDS = 100


class HeldPort:
    """Free port, reserved while this object exists.

    Rank 0's store can still listen on it: the port is bound for reuse, without listening.
    """

    def __init__(self) -> None:
        self._socket = reserved_port()
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
        info = RendezvousStoreInfo(address.decode(), int(port))
        if not 0 < info.master_port < 1 << 16:
            raise ValueError("no such port")
        return info
    except ValueError as error:
        raise RendezvousStateError(
            f"rank 0 published an invalid address or port: {address!r}, {port!r}"
        ) from error


@dataclass(frozen=True, slots=True)
class Sharing:
    """Access to torch's shared stores.

    Args:
        empty: deletes the workers' keys in the TCPStore at an address and port. Raises
            RendezvousTimeoutError if the store accepts the connection and does not answer in time,
            and RendezvousConnectionError if it is gone or cannot be used.
        lasting: address of the backend's own TCPStore, if it has one.
    """

    empty: Callable[[str, int], None]
    lasting: RendezvousStoreInfo | None = None


class _NoAnswer(Exception):
    """Missing answer of a store that torch's agents use."""


class Masters:
    """Publisher and reader of the bootstrap addresses for one node.

    torch's agents keep the address of their first round. A store that they use is therefore
    replaced only once it is gone, or has not answered for long: rank 0 waits for a late answer.

    Args:
        node: this node.
        store_of: returns the store of a round, by its number.
        sharing: None without torch; no store then serves several rounds.
    """

    def __init__(
        self, node: NodeDesc, store_of: Callable[[int], Any], sharing: Sharing | None
    ) -> None:
        self._node = node
        self._store_of = store_of
        self._sharing = sharing
        self._port: HeldPort | None = None
        self._host: NodeDesc | None = None
        self.shared = False
        """True if an agent hosts the workers' store of the present round."""
        self.silent = ""
        """Address and error of the store that the last call waited for, if any."""

    def publish(self, held: RankAssignment, waited_seconds: float) -> RendezvousStoreInfo | None:
        """Publish the bootstrap address of this round, as rank 0.

        Return None while a store that torch's agents use does not answer. The caller calls again.
        """
        store = self._store_of(held.round)
        self.shared = False
        if held.torch_nodes:
            try:
                info = self._adopted(held, waited_seconds) or self._lasting(waited_seconds)
            except _NoAnswer as error:
                self._note_silent(str(error))
                return None
            self.silent = ""
            if info is not None:
                return publish(store, info.master_addr, info.master_port)
        if self._port is None or not held.torch_nodes:
            self.close()
            self._port = HeldPort()
        return publish(store, self._node.host, self._port.number)

    def find(self, held: RankAssignment, waited_seconds: float) -> RendezvousStoreInfo | None:
        """Return the bootstrap address of this round if known, as any other rank."""
        store = self._store_of(held.round)
        self.shared = False
        info, silent = published(store), is_torch_node(held.master)
        if info is None and silent:
            if held.master != self._host and waited_seconds < SILENT_SECONDS:
                return None
            try:
                info = self._adopted(held, waited_seconds)
            except _NoAnswer as error:
                self._note_silent(str(error))
                return None
            if info is not None:
                publish(store, info.master_addr, info.master_port)
        if info is not None:
            self._host = held.master if silent else None
        return info

    def close(self) -> None:
        """Release our port."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _note_silent(self, text: str) -> None:
        if text != self.silent:
            log.warning("%s: waiting for the store that torch's agents use: %s", self._node, text)
        self.silent = text

    def _adopted(self, held: RankAssignment, waited_seconds: float) -> RendezvousStoreInfo | None:
        """Return the emptied store that an agent has hosted since an earlier round, if any.

        Its host may be a torch node outside this round: the torch nodes in it may still use it.

        Raises:
            _NoAnswer: it does not answer yet.
        """
        info = self._earlier(held.round)
        if info is None or (self._port is not None and info.master_port == self._port.number):
            return None
        hosted = any(node.host == info.master_addr for node in held.torch_nodes)
        left_seconds = (AWAITED_SECONDS if hosted else ABSENT_SECONDS) - waited_seconds
        return info if _listens(info) and self._emptied(info, left_seconds) else None

    def _lasting(self, waited_seconds: float) -> RendezvousStoreInfo | None:
        """Return the backend's own store, emptied; None if there is none or it cannot be used.

        Raises:
            _NoAnswer: it does not answer yet.
        """
        info = None if self._sharing is None else self._sharing.lasting
        left_seconds = AWAITED_SECONDS - waited_seconds
        return info if info is not None and self._emptied(info, left_seconds) else None

    def _emptied(self, info: RendezvousStoreInfo, left_seconds: float) -> bool:
        if self._sharing is None:
            return False
        where = f"{info.master_addr}:{info.master_port}"
        try:
            self._sharing.empty(info.master_addr, info.master_port)
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            if isinstance(error, RendezvousTimeoutError) and left_seconds > 0:
                raise _NoAnswer(str(error)) from error
            log.warning("%s: the store at %s is not used: %s", self._node, where, error)
            return False
        log.info("%s: the workers share the store at %s", self._node, where)
        self.shared = True
        return True

    def _earlier(self, number: int) -> RendezvousStoreInfo | None:
        """Return the last address published before that round."""
        for earlier in range(number - 1, max(-1, number - 1 - LOOK_BACK_ROUNDS), -1):
            if (info := published(self._store_of(earlier))) is not None:
                return info
        return None


def _listens(info: RendezvousStoreInfo) -> bool:
    """Return True if a server listens: an agent, since the last round's workers have ended."""
    with suppress(OSError, ValueError):  # ValueError: a name that cannot be encoded
        address = (info.master_addr, info.master_port)
        with socket.create_connection(address, PROBE_SECONDS):
            return True
    return False
