"""c10d rendezvous without torch: state and rounds' stores in our own TCPStore implementation.

One process hosts the store (`Host`); all nodes connect to it. The store and its contents end with
that process. Unlike torch's, this backend then connects to the store's next host and starts again
there; the round numbers of the dynamic rendezvous continue (`dynamic.core.state.joined`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
from datetime import timedelta
from typing import Any

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.c10d.backend import (
    NOTHING,
    STATE_PREFIX,
    C10dRendezvousBackend,
    state_key,
)
from elasticjob_rendezvous.dynamic.stores import of_former_rounds
from elasticjob_rendezvous.protocol.store_health import Failed
from elasticjob_rendezvous.protocol.store_trouble import StoreState
from elasticjob_rendezvous.tcpstore import StoreGone, StoreTimeout, TCPStore, TCPStoreServer

log = logging.getLogger(__name__)

EMPTY_SECONDS = 5.0
READ_SECONDS = 20.0
"""Maximum wait for a key of a round, since the node that should set it may have died."""
PROBE_KEY = "elasticjob/probe"


class Host:
    """Server of a store for the life of its process; deletes former rounds when it is full.

    Args:
        address: listen address; "" means all addresses of this machine.

    Raises:
        RendezvousConnectionError: the port is in use.
    """

    def __init__(self, address: str, port: int) -> None:
        try:
            self._server = TCPStoreServer(address, port, of_former_rounds)
        except OSError as error:
            raise RendezvousConnectionError(
                f"cannot host the c10d store at port {port}: {error}"
            ) from error
        self.port = self._server.port
        log.info("process %d hosts the c10d store at port %d", os.getpid(), self.port)

    def close(self, patience_seconds: float = 0.0) -> None:
        """Stop the store once its clients have disconnected, or after `patience_seconds`."""
        self._server.drained(patience_seconds)
        self._server.close()


class RecoveringBackend(C10dRendezvousBackend):
    """Backend on a `tcpstore.TCPStore` that recovers from the loss of the store's host."""

    reconnects = True
    errors = (StoreGone, StoreTimeout, ValueError, RuntimeError)

    def __init__(self, store: TCPStore, run_id: str) -> None:
        self._connection = 0
        super().__init__(store, run_id)

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            self._initialize()
            return super()._call(operation, *arguments)
        except StoreGone as error:
            raise RendezvousConnectionError(str(error)) from error

    def _initialize(self) -> None:
        """Initialize the state in a new store, since reading a missing key would block."""
        store: TCPStore = self._store
        if store.connected and store.connections == self._connection:
            return
        found = store.compare_set(self._key, b"", NOTHING)
        if self._connection and found == NOTHING:
            log.warning("%s: the c10d store is empty: its host was lost", self._key)
        self._connection = store.connections


def emptied(run_id: str, host: str, port: int, timeout_seconds: float = EMPTY_SECONDS) -> None:
    """Delete all keys of a TCPStore except those of this run; see `master_address.Sharing`.

    Args:
        timeout_seconds: timeout of the connection, and of each request.

    Raises:
        RendezvousTimeoutError: the store accepts the connection and does not answer in time.
        RendezvousConnectionError: no store is reachable there, it is older than torch 2.10 (and
            cannot list its keys), or it also serves another run.
    """
    store = None
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except OSError as error:
        raise RendezvousConnectionError(
            f"the store at {host}:{port} cannot be reached: {error}"
        ) from error
    try:
        store = TCPStore(host, port, timedelta(seconds=timeout_seconds), timeout_seconds)
        _empty(store, run_id)
    except (StoreGone, StoreTimeout) as error:
        silent = isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)
        kind = RendezvousTimeoutError if silent else RendezvousConnectionError
        raise kind(str(error)) from error
    finally:
        if store is not None:
            store.close()


def _empty(store: TCPStore, run_id: str) -> None:
    keys = store.list_keys()
    _refuse_other_runs(keys, run_id, f"{store.host}:{store.port}")
    for key in keys:
        if not key.startswith(STATE_PREFIX):
            store.delete_key(key)


def _refuse_other_runs(keys: list[str], run_id: str, where: str) -> None:
    own = re.compile(re.escape(state_key(run_id)) + r"(\.[0-9]+/.*)?", re.DOTALL)
    rendezvous = [key for key in keys if key.startswith(STATE_PREFIX)]
    others = [key for key in rendezvous if not own.fullmatch(key)]
    if others:
        raise RendezvousConnectionError(
            f"the c10d store at {where} serves another run too: {min(others)}"
        )


def connect(
    host: str,
    port: int,
    run_id: str,
    timeout_seconds: float,
    read_seconds: float = READ_SECONDS,
) -> tuple[RecoveringBackend, TCPStore, TCPStore]:
    """Return a backend, the store for its rounds, and the backend's own store.

    Each store has a separate connection, and waits up to `read_seconds` for a key.

    Raises:
        RendezvousConnectionError: no store answers there within `timeout_seconds`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    made: list[TCPStore] = []
    try:
        for _ in range(2):
            made.append(TCPStore(host, port, timeout))
        backend = RecoveringBackend(made[0], run_id)
    except (StoreGone, RendezvousConnectionError) as error:
        for store in made:
            store.close()
        raise RendezvousConnectionError(str(error)) from error
    for store in made:
        store.set_timeout(timedelta(seconds=read_seconds))
    return backend, made[1], made[0]


class C10dProbe:
    """Probe of a store for `store_monitor.StoreProbe`: one request over a separate connection.

    One call at a time.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._store: TCPStore | None = None
        self._closed = False

    def __call__(self, seconds: float) -> Failed | None:
        if self._closed:
            return None
        try:
            if self._store is None:
                self._store = TCPStore(self._host, self._port, timedelta(seconds=seconds / 2))
            self._store.check([PROBE_KEY])
        except (StoreGone, StoreTimeout, OSError) as error:
            return Failed(StoreState.UNREACHABLE, str(error.__cause__ or error))
        return None

    def close(self) -> None:
        """Stop probing and disconnect: the store's host waits for its clients to disconnect."""
        self._closed = True
        if self._store is not None:
            self._store.close()
