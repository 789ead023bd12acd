"""A handler that is made when it is first needed, and made again until it can be.

What keeps a job's rendezvous may come later than its agents: etcd is not there yet, the pod
that hosts the c10d store is still being made, or is being replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from elasticjob_agent.api.looking import told
from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
    RendezvousUnsupportedError,
)
from elasticjob_rendezvous.store_monitor import StoreProbe

log = logging.getLogger("elasticjob.agent")

RETRY_SECONDS = 0.5
STORE_SECONDS = 20.0
"""How long the keys of a new round are waited for: who is to set one may just have died."""


class PersistentHandler(RendezvousHandler):
    """Hands every call on to the handler that `make` gives.

    Args:
        make: the handler; raises RendezvousConnectionError where that is not yet possible, and
            RendezvousUnsupportedError where it never will be.
        join_seconds: how long one `next_rendezvous` takes at most, that included.
        closed: is called after the handler was shut down or left for good.
        first_round: what the handler numbers its first round by; here it is 0.
        host_stays: one of the job's nodes keeps the store, and stays at the end until the others
            have seen it.
        connect_seconds: how long the handler is waited for; None: `join_seconds`.
        read_seconds: how long the keys of a new round are waited for, if not STORE_SECONDS.
        probe: tells whether what keeps the rendezvous can be used; asked once it was reached.
    """

    persists = True
    """A place that could not be had for want of a connection is worth seeking again."""

    def __init__(
        self,
        make: Callable[[], RendezvousHandler],
        backend: str,
        run_id: str,
        join_seconds: float,
        closed: Callable[[], None] = lambda: None,
        first_round: int = 0,
        host_stays: bool = False,
        connect_seconds: float | None = None,
        read_seconds: float | None = None,
        probe: StoreProbe | None = None,
    ) -> None:
        self.host_stays = host_stays
        self._connect_seconds = join_seconds if connect_seconds is None else connect_seconds
        self._read_seconds = STORE_SECONDS if read_seconds is None else read_seconds
        self._first_round = first_round
        self._make = make
        self._backend = backend
        self._run_id = run_id
        self._closed = closed
        self._going = threading.Event()
        self._store_probe = probe
        self._handler: RendezvousHandler | None = None
        self.join_seconds = join_seconds

    def get_backend(self) -> str:
        return self._backend

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return self._handler is not None and self._handler.use_agent_store

    @property
    def store_probe(self) -> StoreProbe | None:
        """See `store_monitor`. Until the store is reached for the first time it is waited for, and
        `setting_up` tells that."""
        found = self._store_probe
        if found is None:
            return None
        return replace(found, ask=lambda s: found.ask(s) if self._handler is not None else None)

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._made().next_rendezvous()
        if info.store is not None:
            info.store.set_timeout(timedelta(seconds=self._read_seconds))
        return replace(info, round=info.round - self._first_round)

    def is_closed(self) -> bool:
        return self._handler is not None and self._handler.is_closed()

    def set_closed(self) -> None:
        if self._handler is not None:
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0 if self._handler is None else self._handler.num_nodes_waiting()

    def lost(self) -> bool:
        """Whether a node of our round is gone, where the handler can tell."""
        return told(self._handler, "lost")

    def moved_on(self) -> bool:
        """Whether others of our round want a newer one, where the handler can tell."""
        return told(self._handler, "moved_on")

    def gone(self) -> frozenset[int]:
        """The ranks that are missed in our round, where the handler can tell."""
        gone = getattr(self._handler, "gone", frozenset)
        return frozenset(gone())

    def last_stores(self) -> list[Any]:
        """The stores of the last rounds, newest first, where the handler can tell."""
        stores: list[Any] = getattr(self._handler, "last_stores", list)()
        return stores

    def stay(self) -> None:
        """We are done with our round: who ends now is not missed, where the handler can say so."""
        stay = getattr(self._handler, "stay", None)
        if stay is not None:
            stay()

    def setting_up(self) -> bool:
        """Whether there is no rendezvous yet: its keeper was not reached, or it is being made."""
        if self._handler is None:
            return True
        return told(self._handler, "setting_up")

    def leave(self) -> None:
        """Go, and leave the rendezvous open. A `next_rendezvous` under way ends."""
        self._going.set()
        leave = getattr(self._handler, "leave", None)
        if leave is not None:
            leave()

    def shutdown(self) -> bool:
        self._going.set()
        return self._handler is None or self._handler.shutdown()

    def close(self) -> None:
        """Let go of everything; after `leave` or `shutdown`."""
        self._going.set()
        self._closed()

    def _made(self) -> RendezvousHandler:
        patience = min(self.join_seconds, self._connect_seconds)
        deadline = time.monotonic() + patience
        told = False
        while self._handler is None:
            if self._going.is_set():
                raise RendezvousGracefulExitError("this node leaves")
            try:
                made = self._make()
            except RendezvousUnsupportedError:
                raise  # it would be the same for ever
            except RendezvousConnectionError as error:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(
                        f"nobody could be reached within {patience:g} s: {error}"
                    ) from error
                if not told:
                    log.warning("no rendezvous yet, trying again: %s", error)
                told = True
                self._going.wait(RETRY_SECONDS)
                continue
            self._handler = made
            if self._going.is_set():  # whoever set it found no handler
                self.leave()
                raise RendezvousGracefulExitError("this node leaves")
        return self._handler
