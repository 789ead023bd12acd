"""Rendezvous handlers of the backends other than etcd's v3 API: etcd-v2 and c10d.

Each imports only what it needs. Their capabilities and limits: `docs/backends.md`.
"""

from __future__ import annotations

import copy
import logging
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticjob_agent.polling.reconnecting_handler import ReconnectingHandler
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import AgentSettings, Backend
from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elasticjob_rendezvous.etcd.reachability import UNIX
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.store_trouble import C10D_STORE, endpoints_text
from elasticjob_rendezvous.store_monitor import StoreProbe

if TYPE_CHECKING:
    from elasticjob_rendezvous.c10d.native import C10dProbe

log = logging.getLogger("elasticjob.agent")

CONNECT_SECONDS = 5.0
HOST_TIMEOUT_SECONDS = 10.0
"""Maximum time that the host of a c10d store keeps it up for other nodes to see the end."""
BEATS = 3
"""Default number of missed heartbeats after which a node is lost."""
PROBE_READ_SECONDS = 1
LEAST_CALL_SECONDS = 2.0
"""Minimum last-call time. Nodes poll the shared state about once a second; a stopped node needs
time to join again."""


def job_handler(settings: AgentSettings) -> ReconnectingHandler | None:
    """Return the rendezvous handler of the job's backend; None for etcd v3.

    Raises:
        SettingsError: a dependency of the backend is not installed, or a setting is wrong.
    """
    match settings.backend:
        case Backend.ETCD:
            return None
        case Backend.ETCD_V2:
            return _etcd_v2(settings)
        case Backend.C10D:
            return _c10d(settings)


def _etcd_v2(settings: AgentSettings) -> ReconnectingHandler:
    try:
        from elasticjob_rendezvous import etcd_v2
    except ImportError as error:
        raise SettingsError(
            f"the rendezvous backend etcd-v2 needs python-etcd ({error}): "
            "install elasticjob[etcd-v2]"
        ) from error
    bounds, access, backend_options = _bounds(settings), settings.etcd, settings.backend_options
    if backend_options.etcd_prefix is not None:
        try:
            etcd_v2.Paths.of(backend_options.etcd_prefix, settings.rendezvous_id)
        except ValueError as error:
            raise SettingsError(f"--rdzv-conf etcd_prefix: {error}") from error
    options: dict[str, Any] = {
        "timeout": bounds.join_timeout_seconds,
        "last_call_timeout": bounds.last_call_seconds,
        "recovery_call_timeout": max(LEAST_CALL_SECONDS, bounds.settle_seconds),
        "expected_nodes": bounds.expected,
        "username": access.user,
        "password": access.password,
        "etcd_prefix": backend_options.etcd_prefix or etcd_v2.DEFAULT_PREFIX,
        "read_timeout": backend_options.read_seconds or etcd_v2.DEFAULT_READ_TIMEOUT_SECONDS,
    }
    if any(endpoint.startswith("https://") for endpoint in access.endpoints):
        options["protocol"] = "https"
    if access.tls is not None:
        options["protocol"] = "https"
        options["cacert"] = access.tls.ca_file
        options["server_name"] = access.tls.server_name
        options["cert"], options["key"] = access.tls.cert_file, access.tls.key_file
    endpoints = ",".join(
        endpoint if endpoint.startswith(UNIX) else endpoint.rpartition("://")[2]
        for endpoint in access.endpoints
    )
    parameters = RendezvousParameters(
        "etcd",
        endpoints,
        settings.rendezvous_id,
        bounds.min_nodes,
        bounds.max_nodes,
        settings.address,
        **options,
    )
    return ReconnectingHandler(
        lambda: etcd_v2.create_rdzv_handler(parameters),
        settings.backend,
        settings.rendezvous_id,
        bounds.join_timeout_seconds,
        first_round=1,
        connect_seconds=backend_options.connect_seconds,
        probe=_probe_v2(parameters),
    )


def _probe_v2(parameters: RendezvousParameters) -> StoreProbe:
    from elasticjob_rendezvous.etcd_v2 import probe
    from elasticjob_rendezvous.etcd_v2.client import create_client

    folder = str(parameters.config["etcd_prefix"]).rstrip("/")
    quick = copy.copy(parameters)
    quick.config = {**parameters.config, "read_timeout": PROBE_READ_SECONDS}
    ask = probe.EtcdV2Probe(lambda: create_client(quick), folder)
    return StoreProbe(probe.STORE, endpoints_text(tuple(parameters.endpoint.split(","))), ask)


def _c10d(settings: AgentSettings) -> ReconnectingHandler:
    from elasticjob_rendezvous.c10d.native import C10dProbe
    from elasticjob_rendezvous.dynamic.endpoint import parse_endpoint

    if len(settings.etcd.endpoints) != 1:
        raise SettingsError(
            "the rendezvous backend c10d has one endpoint: its store is on one host"
        )
    host, port = parse_endpoint(settings.etcd.endpoints[0].rpartition("://")[2], 0)
    ask = C10dProbe(host, port)
    made = _C10d(settings, host, port, ask)
    return ReconnectingHandler(
        made.handler,
        settings.backend,
        settings.rendezvous_id,
        _bounds(settings).join_timeout_seconds,
        made.close,
        host_stays=settings.hosts_store is not None,
        connect_seconds=settings.backend_options.connect_seconds,
        read_seconds=settings.backend_options.read_seconds,
        probe=StoreProbe(C10D_STORE, endpoints_text((settings.etcd.endpoints[0],)), ask),
    )


class _C10d:
    """Connection to a c10d store, and its host if this agent hosts it."""

    def __init__(self, settings: AgentSettings, host: str, port: int, probe: C10dProbe) -> None:
        self._settings = settings
        self._host, self._port = host, port
        self._hosted: Any = None
        self._stores: list[Any] = []
        self._probe = probe

    def handler(self) -> RendezvousHandler:
        from elasticjob_rendezvous.c10d import native
        from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler, new_node
        from elasticjob_rendezvous.dynamic.master_address import Sharing

        settings = self._settings
        if self._hosted is None:
            self._hosted = self._host_if_ours()
        # The host connects by its own address: the endpoint's name may still resolve to the
        # previous host.
        host = self._host if self._hosted is None else settings.address
        patience = settings.backend_options.connect_seconds
        backend, *self._stores = native.connect(
            host,
            self._port,
            settings.rendezvous_id,
            CONNECT_SECONDS if patience is None else max(0.1, min(CONNECT_SECONDS, patience)),
            settings.backend_options.read_seconds or native.READ_SECONDS,
        )
        # If torchrun nodes take part, all workers use this store as their bootstrap store.
        sharing = Sharing(
            partial(native.emptied, settings.rendezvous_id),
            RendezvousStoreInfo(self._host, self._port),
        )
        return DynamicRendezvousHandler(
            new_node(settings.address),
            _dynamic(settings),
            backend,
            self._stores[0],
            sharing=sharing,
        )

    def _host_if_ours(self) -> Any:
        from elasticjob_rendezvous.c10d import native
        from elasticjob_rendezvous.dynamic.endpoint import is_this_machine

        settings = self._settings
        if settings.hosts_store:
            return native.Host(_listening_store(settings), self._port)
        if settings.hosts_store is None and is_this_machine(self._host):
            try:
                return native.Host(_listening_store(settings), self._port)
            except RendezvousConnectionError as error:
                log.info("another process seems to host the store: %s", error)
        return None

    def close(self, patience_seconds: float = HOST_TIMEOUT_SECONDS) -> None:
        for store in (self._probe, *self._stores):
            store.close()
        if self._hosted is not None:
            self._hosted.close(patience_seconds)


def _listening_store(settings: AgentSettings) -> str:
    """Return the address that a hosted store listens at; empty for all addresses.

    A store has no password, so a pod's listens only at the address that peers use. An agent
    started by hand may have several addresses, any of which may be the endpoint.
    """
    anywhere = settings.bind_address in ("", "0.0.0.0", "::")
    if not anywhere:
        return settings.bind_address
    return settings.address if settings.hosts_store else ""


def _dynamic(settings: AgentSettings) -> Any:
    from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout

    def limit(seconds: float | None) -> timedelta | None:
        return None if seconds is None else timedelta(seconds=seconds)

    bounds, backend_options = _bounds(settings), settings.backend_options
    beats = backend_options.beats or BEATS
    interval = max(1.0, bounds.keep_alive_seconds / beats)
    timeout = RendezvousTimeout(
        join=timedelta(seconds=bounds.join_timeout_seconds),
        last_call=timedelta(seconds=max(LEAST_CALL_SECONDS, bounds.last_call_seconds)),
        close=limit(backend_options.close_seconds),
        heartbeat=limit(backend_options.heartbeat_seconds),
    )
    return RendezvousSettings(
        settings.rendezvous_id,
        bounds.min_nodes,
        bounds.max_nodes,
        timeout,
        timedelta(seconds=interval),
        beats,
        lasting_store=True,
        recovery_call=timedelta(seconds=max(LEAST_CALL_SECONDS, bounds.settle_seconds)),
        expected_nodes=bounds.expected,
    )


def _bounds(settings: AgentSettings) -> RendezvousParams:
    if settings.bounds is None:
        raise SettingsError("ELASTICJOB_BOUNDS must be set for any backend but etcd")
    return settings.bounds
