"""Where the workers of each round meet, as one node knows it from round to round.

Rank 0 publishes MASTER_ADDR and MASTER_PORT in the round's store: a node of ours a new port in
every round, on which its worker will listen. Where a torch node takes part there is more to it,
as a plain torchrun (without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) does it otherwise: the agent
of rank 0 hosts the workers' store for as long as it lives, says where in the first round alone,
and all agents remember that. With such nodes in the round

* we publish the same address every time: of the store that the backend itself is on, if it is
  a TCPStore, since nothing goes on without that; else of ours;
* a store that torch's agent hosts is found again in the rounds before, and published for the
  nodes that are new;
* a store that serves round after round is emptied: what the workers of the last one left in it
  would mislead those of the next. None of them starts before we have told our role, which
  comes after this.
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
"""So long a torch node of rank 0 may take to publish, before it is taken to have done so once."""
PROBE_SECONDS = 1.0
LOOK_BACK_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Sharing:
    """What is to be had of torch's stores.

    Args:
        empty: deletes what workers left in the TCPStore at an address and port; raises
            RendezvousConnectionError.
        lasting: where the backend's own TCPStore is, if it is on one.
    """

    empty: Callable[[str, int], None]
    lasting: RendezvousStoreInfo | None = None


class Masters:
    """One node's part in it.

    Args:
        node: ourselves.
        store_of: the store of a round, by its number.
        sharing: None where there is no torch: no store serves twice then.
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
        """Whether an agent hosts the workers' store of the present round."""

    def publish(self, held: Seat) -> RendezvousStoreInfo:
        """As rank 0: say where the workers of this round meet."""
        store = self._store_of(held.round)
        self.shared = False
        if held.torchs and (info := self._adopted(held) or self._lasting()) is not None:
            return master.publish(store, info.master_addr, info.master_port)
        if self._port is None or not held.torchs:
            self.close()
            self._port = master.HeldPort()
        return master.publish(store, self._node.addr, self._port.number)

    def look(self, held: Seat, waited_seconds: float) -> RendezvousStoreInfo | None:
        """As any other rank: where they meet, if that can be known by now."""
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
        """Give our port back."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _adopted(self, held: Seat) -> RendezvousStoreInfo | None:
        """The store that an agent hosts since an earlier round; it is empty now.

        Also of a torch node that is not in this one: those that are may look nowhere else.
        """
        info = self._earlier(held.round)
        if info is None or (self._port is not None and info.master_port == self._port.number):
            return None
        return info if _listens(info) and self._emptied(info) else None

    def _lasting(self) -> RendezvousStoreInfo | None:
        """The backend's own store; it is empty now."""
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
        """What was last published before that round."""
        for earlier in range(number - 1, max(-1, number - 1 - LOOK_BACK_ROUNDS), -1):
            if (info := master.published(self._store_of(earlier))) is not None:
                return info
        return None


def _listens(info: RendezvousStoreInfo) -> bool:
    """Whether somebody does. The workers of the last round have ended: then it is an agent."""
    with suppress(OSError):
        address = (info.master_addr, info.master_port)
        with socket.create_connection(address, PROBE_SECONDS):
            return True
    return False
