"""Bootstrap address of the workers in each round, as tracked by one node.

Rank 0 publishes MASTER_ADDR and MASTER_PORT in the round's store. Our nodes publish a new port in
every round, on which their worker of rank 0 listens. A plain torchrun (without
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) differs: the agent of rank 0 hosts the workers' store for its
whole life and publishes its address only in the first round, and all agents remember it. With
such nodes in the round

* we publish the same address every time: that of the backend's own store if it is a TCPStore,
  since no round works without it; otherwise ours;
* the address of a store hosted by torch's agent is looked up in the earlier rounds, and published
  for new nodes;
* a store that serves several rounds is emptied first, since values of the last round's workers
  would mislead the next ones. No worker starts before we have announced our role, which happens
  afterwards.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousStoreInfo
from elasticjob_rendezvous.dynamic import master
from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc, is_torchs
from elasticjob_rendezvous.dynamic.core.state import Seat

log = logging.getLogger(__name__)

SILENT_SECONDS = 3.0
"""Wait for a torch node of rank 0 to publish; later assume that it did so in an earlier round."""
PROBE_SECONDS = 1.0
LOOK_BACK_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Sharing:
    """Access to torch's shared stores.

    Args:
        empty: deletes the workers' keys in the TCPStore at an address and port; raises
            RendezvousConnectionError.
        lasting: address of the backend's own TCPStore, if it has one.
    """

    empty: Callable[[str, int], None]
    lasting: RendezvousStoreInfo | None = None


class Masters:
    """Publisher and reader of the bootstrap addresses for one node.

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
        self._port: master.HeldPort | None = None
        self._host: NodeDesc | None = None
        self.shared = False
        """True if an agent hosts the workers' store of the present round."""

    def publish(self, held: Seat) -> RendezvousStoreInfo:
        """Publish the bootstrap address of this round, as rank 0."""
        store = self._store_of(held.round)
        self.shared = False
        if held.torchs and (info := self._adopted(held) or self._lasting()) is not None:
            return master.publish(store, info.master_addr, info.master_port)
        if self._port is None or not held.torchs:
            self.close()
            self._port = master.HeldPort()
        return master.publish(store, self._node.addr, self._port.number)

    def look(self, held: Seat, waited_seconds: float) -> RendezvousStoreInfo | None:
        """Return the bootstrap address of this round if known, as any other rank."""
        store = self._store_of(held.round)
        self.shared = False
        info, silent = master.published(store), is_torchs(held.master)
        if info is None and silent:
            if held.master != self._host and waited_seconds < SILENT_SECONDS:
                return None
            if (info := self._adopted(held)) is not None:
                master.publish(store, info.master_addr, info.master_port)
        if info is not None:
            self._host = held.master if silent else None
        return info

    def close(self) -> None:
        """Release our port."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _adopted(self, held: Seat) -> RendezvousStoreInfo | None:
        """Return the emptied store that an agent has hosted since an earlier round, if any.

        Its host may be a torch node outside this round: the torch nodes in it may still use it.
        """
        info = self._earlier(held.round)
        if info is None or (self._port is not None and info.master_port == self._port.number):
            return None
        return info if _listens(info) and self._emptied(info) else None

    def _lasting(self) -> RendezvousStoreInfo | None:
        """Return the backend's own store, emptied; None if there is none or emptying failed."""
        info = None if self._sharing is None else self._sharing.lasting
        return info if info is not None and self._emptied(info) else None

    def _emptied(self, info: RendezvousStoreInfo) -> bool:
        if self._sharing is None:
            return False
        where = f"{info.master_addr}:{info.master_port}"
        try:
            self._sharing.empty(info.master_addr, info.master_port)
        except RendezvousConnectionError as error:
            log.warning("%s: the store at %s is not used: %s", self._node, where, error)
            return False
        log.info("%s: the workers share the store at %s", self._node, where)
        self.shared = True
        return True

    def _earlier(self, number: int) -> RendezvousStoreInfo | None:
        """Return the last address published before that round."""
        for earlier in range(number - 1, max(-1, number - 1 - LOOK_BACK_ROUNDS), -1):
            if (info := master.published(self._store_of(earlier))) is not None:
                return info
        return None


def _listens(info: RendezvousStoreInfo) -> bool:
    """Return True if a server listens: an agent, since the last round's workers have ended."""
    with suppress(OSError):
        address = (info.master_addr, info.master_port)
        with socket.create_connection(address, PROBE_SECONDS):
            return True
    return False
