"""Reconnecting rendezvous handler: creates its handler on first use, and retries until it can.

The rendezvous store may start later than the job's agents: etcd is not up yet, or the pod that
hosts the c10d store is being created or replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from elasticjob_agent.polling.poll import query_handler
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
"""Default wait for a key of a new round. The node that should set it may have just died."""


class ReconnectingHandler(RendezvousHandler):
    """Handler that delegates to the one that `make` creates.

    Args:
        make: creates the handler; raises RendezvousConnectionError if that is not possible yet, and
            RendezvousUnsupportedError if it never will be.
        backend: name of the backend.
        run_id: id of the run.
        join_seconds: maximum duration of `next_rendezvous`, including the creation.
        closed: called by `close`, after the handler was shut down or left for good.
        first_round: the handler's number of its first round, which is 0 here.
        host_stays: a node of the job hosts the store, and keeps it up at the end until the other
            nodes have seen the end.
        connect_seconds: maximum wait for the creation; None: `join_seconds`.
        read_seconds: maximum wait for a key of a new round; None: `STORE_SECONDS`.
        probe: checks if the store is usable; called once the store was reached.
        retry_seconds: pause between two attempts to create the handler.
    """

    persists = True
    """True: a join that failed for lack of a connection is worth retrying."""

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
        retry_seconds: float = RETRY_SECONDS,
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
        self._retry_seconds = retry_seconds
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
        """Probe of the store, see `store_monitor`.

        Reports no problem until the store is reached for the first time; `setting_up` covers that
        time.
        """
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
        """Return True if a node of the round is gone, if the handler can find out."""
        return query_handler(self._handler, "lost")

    def moved_on(self) -> bool:
        """Return True if other nodes of the round want a newer one, if the handler can find out."""
        return query_handler(self._handler, "moved_on")

    def gone(self) -> frozenset[int]:
        """Return the group ranks missing in the round, if the handler can find out."""
        gone = getattr(self._handler, "gone", frozenset)
        return frozenset(gone())

    def last_stores(self) -> list[Any]:
        """Return the stores of the last rounds, newest first, if the handler can find out."""
        stores: list[Any] = getattr(self._handler, "last_stores", list)()
        return stores

    def stay(self) -> None:
        """Mark this node as done with its round, so that its end does not count as a loss.

        Has no effect if the handler does not support it.
        """
        stay = getattr(self._handler, "stay", None)
        if stay is not None:
            stay()

    def setting_up(self) -> bool:
        """Return True before a rendezvous exists: not reached yet, or still being set up."""
        if self._handler is None:
            return True
        return query_handler(self._handler, "setting_up")

    def leave(self) -> None:
        """Leave the rendezvous, which stays open, and end a running `next_rendezvous`."""
        self._going.set()
        leave = getattr(self._handler, "leave", None)
        if leave is not None:
            leave()

    def shutdown(self) -> bool:
        self._going.set()
        return self._handler is None or self._handler.shutdown()

    def close(self) -> None:
        """Release all resources; call after `leave` or `shutdown`."""
        self._going.set()
        self._closed()

    def _made(self) -> RendezvousHandler:
        patience = min(self.join_seconds, self._connect_seconds)
        deadline = time.monotonic() + patience
        logged = False
        while self._handler is None:
            if self._going.is_set():
                raise RendezvousGracefulExitError("this node leaves")
            try:
                made = self._make()
            except RendezvousUnsupportedError:
                raise  # permanent
            except RendezvousConnectionError as error:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(
                        f"cannot reach the rendezvous within {patience:g} s: {error}"
                    ) from error
                if not logged:
                    log.warning("no rendezvous yet, trying again: %s", error)
                logged = True
                self._going.wait(self._retry_seconds)
                continue
            self._handler = made
            if self._going.is_set():  # `leave` was called before there was a handler
                self.leave()
                raise RendezvousGracefulExitError("this node leaves")
        return self._handler
