"""Creation of a dynamic rendezvous handler from torch's parameters."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.dynamic.core.settings import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    KEEP_ALIVE_MAX_ATTEMPT,
    LONGEST,
    RendezvousTimeout,
)
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler, Prefixed
from elasticjob_rendezvous.dynamic.master_address import Sharing
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend
from elasticjob_rendezvous.dynamic.stores import PrefixedStore


def create_handler(
    store: Any,
    backend: RendezvousBackend,
    params: RendezvousParameters,
    prefixed: Prefixed = PrefixedStore,
    sharing: Sharing | None = None,
) -> DynamicRendezvousHandler:
    """Create a handler from torch's parameters.

    Settings, in whole seconds: `join_timeout`, `last_call_timeout`, `close_timeout`,
    `heartbeat_timeout`, `keep_alive_interval`; `keep_alive_max_attempt`; and
    `close_on_shutdown` (true): if false, `shutdown` leaves without closing.

    Raises:
        ValueError: a setting is malformed or out of range; the message names it.
    """

    def limit(name: str) -> timedelta | None:
        seconds = params.get_as_int(f"{name}_timeout")
        return None if seconds is None else timedelta(seconds=in_range(f"{name}_timeout", seconds))

    def number(name: str, default: int) -> int:
        value = params.get_as_int(name, default)
        if value is None:
            raise ValueError(f"the rendezvous setting {name!r} must be a whole number, not None")
        return in_range(name, value)

    def in_range(name: str, value: int) -> int:
        most = int(LONGEST.total_seconds())
        if abs(value) > most:  # too large for a timedelta
            raise ValueError(f"the rendezvous setting {name!r} must be at most {most}, not {value}")
        return value

    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(limit("join"), limit("last_call"), limit("close"), limit("heartbeat")),
        number("keep_alive_interval", KEEP_ALIVE_INTERVAL_SECONDS),
        number("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT),
        prefixed,
        params.get_as_bool("close_on_shutdown", True) is not False,
        sharing,
    )
