"""Probe of a c10d store: one request over a separate connection."""

from __future__ import annotations

from datetime import timedelta

from elasticjob_rendezvous.protocol.store_health import Failed
from elasticjob_rendezvous.protocol.store_trouble import C10D_STORE, StoreState
from elasticjob_rendezvous.tcpstore import StoreGone, StoreTimeout, TCPStore

STORE = C10D_STORE
KEY = "elasticjob/probe"


class C10dProbe:
    """Probe for `store_monitor.StoreProbe`. One call at a time."""

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
            self._store.check([KEY])
        except (StoreGone, StoreTimeout, OSError) as error:
            return Failed(StoreState.UNREACHABLE, str(error.__cause__ or error))
        return None

    def close(self) -> None:
        """Stop probing and disconnect: the store's host waits for its clients to disconnect."""
        self._closed = True
        if self._store is not None:
            self._store.close()
