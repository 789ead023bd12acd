"""Conversion of torch's `RendezvousParameters` to the settings of a v3 member.

The settings have the meaning and the defaults of `elasticjob agent --rdzv-conf`: handlers and
agents of one run join the same rendezvous, so they must derive the same keys, bounds and secret.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import secrets
import socket
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.etcd.client import Tls
from elasticjob_rendezvous.etcd.member import MemberSettings
from elasticjob_rendezvous.etcd.reachability import DEFAULT_PORT, address_of, address_towards
from elasticjob_rendezvous.links.wire import run_key
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.records.keys import job_prefix
from elasticjob_rendezvous.protocol.records.params import (
    LEAST_CONFIRM_SECONDS,
    LEAST_JOIN_SECONDS,
    LEAST_KEEP_ALIVE_SECONDS,
    RendezvousParams,
)
from elasticjob_rendezvous.protocol.text import echoed, hint

log = logging.getLogger(__name__)

BACKEND = "elasticjob"
_SECONDS = (
    "timeout join_timeout last_call_timeout keep_alive_seconds keep_alive confirm confirm_seconds "
    "settle stop_grace scale_up_wait leave_grace connect_timeout"
)
_COUNTS = "increment incarnation slots max_restarts"
_TEXTS = (
    "protocol cacert cert key server_name user password password_file namespace job_key node_name "
    "role"
)
SETTINGS = frozenset(f"{_SECONDS} {_COUNTS} {_TEXTS}".split())
"""Supported settings. torchrun itself adds only `timeout`, for every backend."""


def timeout_seconds(parameters: RendezvousParameters) -> float:
    """Return the join timeout; `join_timeout` takes precedence over torchrun's own `timeout`."""
    names = ("join_timeout", "timeout")
    return _seconds(parameters, 600.0, *names, least=LEAST_JOIN_SECONDS, note="a round takes time")


def member_settings(parameters: RendezvousParameters) -> MemberSettings:
    """Return the settings of this node's member.

    Settings, in seconds: `join_timeout` (or `timeout`), `last_call_timeout`, `keep_alive_seconds`,
    `confirm`, `settle`, `stop_grace`, `scale_up_wait`, `leave_grace`, `connect_timeout`. Counts:
    `increment`, `incarnation`, `slots`, `max_restarts`. etcd: `protocol` (http or https), `cacert`,
    `cert`, `key`, `server_name`, `user`, `password`, `password_file`. Names: `namespace`,
    `job_key`, `node_name`, `role`.

    Raises:
        ValueError: a setting is malformed or unknown; the message names it.
    """
    for unknown in sorted(set(parameters.config) - SETTINGS):
        raise ValueError(
            f"the backend {BACKEND} has no rendezvous setting {echoed(unknown)}; "
            f"{hint(unknown, SETTINGS)}"
        )
    endpoints = _endpoints(parameters)
    address = _address(parameters, endpoints)
    bounds = _bounds(parameters)
    nonce = secrets.token_hex(8)
    user, password = parameters.get("user"), _password(parameters)
    prefix = job_prefix(
        _namespace(parameters),
        parameters.run_id,
        parameters.get_as_int("incarnation") or 0,
    )
    config = Config(
        prefix=prefix,
        identity=_identity(parameters, nonce, address),
        session_nonce=nonce,
        bounds=bounds,
        jitter=random.random(),
        keep_alive_seconds=bounds.keep_alive_seconds,
        connect_seconds=_seconds(parameters, 30.0, "connect_timeout"),
    )
    secret = parameters.get("job_key")
    shared = hashlib.sha256(str(secret).encode()).digest() if secret else None
    loopback = ip_address(address).is_loopback
    return MemberSettings(
        endpoints=endpoints,
        config=config,
        job_key=shared or (run_key(prefix, user, password) if password else b""),
        key_in_etcd=not (shared or password),
        tls=_tls(parameters),
        user=user,
        password=password,
        bind_address=address if loopback else "::" if ":" in address else "0.0.0.0",
    )


def _namespace(parameters: RendezvousParameters) -> str:
    """Return the namespace, which must not contain the beginning of another run's id."""
    namespace = str(parameters.get("namespace") or "default")
    if "/" in namespace:
        raise ValueError(
            f"the rendezvous setting 'namespace' must not contain a slash: {echoed(namespace)}; "
            "begin the run id with the part after it"
        )
    return namespace


def _bounds(parameters: RendezvousParameters) -> RendezvousParams:
    restarts = parameters.get_as_int("max_restarts")
    return RendezvousParams(
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        increment=parameters.get_as_int("increment") or 1,
        max_restarts=3 if restarts is None else restarts,
        join_timeout_seconds=timeout_seconds(parameters),
        last_call_seconds=_seconds(parameters, 30.0, "last_call_timeout"),
        keep_alive_seconds=_seconds(
            parameters,
            5.0,
            "keep_alive_seconds",
            "keep_alive",
            least=LEAST_KEEP_ALIVE_SECONDS,
            note="etcd grants no shorter lease",
        ),
        confirm_seconds=_seconds(
            parameters,
            5.0,
            "confirm",
            "confirm_seconds",
            least=LEAST_CONFIRM_SECONDS,
            note="slower members are left out",
        ),
        settle_seconds=_seconds(parameters, 3.0, "settle"),
        stop_grace_seconds=_seconds(parameters, 10.0, "stop_grace"),
        scale_up_wait_seconds=_seconds(parameters, 0.0, "scale_up_wait"),
        leave_seconds=_seconds(parameters, 30.0, "leave_grace"),
    )


def _identity(parameters: RendezvousParameters, nonce: str, address: str) -> Identity:
    host = socket.gethostname()
    return Identity(
        id=nonce,
        name=str(parameters.get("node_name") or f"{host}-{os.getpid()}"),
        address=address,
        agent_port=0,
        slots=parameters.get_as_int("slots") or 1,
        role=str(parameters.get("role") or "default"),
        node=host,
    )


def _seconds(
    parameters: RendezvousParameters, default: float, *names: str, least: int = 0, note: str = ""
) -> float:
    """Return the first of these settings that is given. `note` is the reason for `least`."""
    for name in names:
        value = parameters.get_as_float(name)
        if value is None:
            continue
        if not least <= value <= 1e7:
            reason = f" ({note})" if note and 0 <= value < least else ""
            raise ValueError(
                f"the rendezvous setting {echoed(name)} must be seconds, at least {least}{reason}, "
                f"not {value:g}"
            )
        return value
    return default


def _endpoints(parameters: RendezvousParameters) -> tuple[str, ...]:
    protocol = str(parameters.get("protocol") or "http")
    if protocol not in ("http", "https"):
        raise ValueError(
            f"the rendezvous setting 'protocol' must be http or https: {echoed(protocol)}"
        )
    named = [part.strip() for part in parameters.endpoint.split(",") if part.strip()]
    if not named:
        raise ValueError("the rendezvous endpoint must name etcd, such as host:2379")
    return tuple(part if "://" in part else f"{protocol}://{part}" for part in named)


def _address(parameters: RendezvousParameters, endpoints: tuple[str, ...]) -> str:
    """Return this node's address for peers: local_addr, else its source address towards etcd."""
    if parameters.local_addr:
        try:
            return address_of(parameters.local_addr)
        except OSError as error:
            raise ValueError(
                f"the local address {echoed(parameters.local_addr)} is not a host address: {error}"
            ) from error
    try:
        parts = urlsplit(endpoints[0])
        return address_towards(parts.hostname or "localhost", parts.port or DEFAULT_PORT)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the rendezvous endpoint {echoed(endpoints[0])} cannot be reached from here "
            f"({error}): correct it, or give this node's own address (--local-addr)"
        ) from error


def _password(parameters: RendezvousParameters) -> str | None:
    path = parameters.get("password_file")
    if not path:
        given = parameters.get("password")
        if given is None:
            return None
        log.warning(
            "the rendezvous setting 'password' is visible to every user of this machine if it is "
            "on the command line: put the password into a file and give 'password_file'"
        )
        return str(given)
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ValueError(
            f"the rendezvous setting 'password_file': {echoed(path)} cannot be read: "
            f"{error.strerror}"
        ) from error


def _tls(parameters: RendezvousParameters) -> Tls | None:
    names = ("cacert", "cert", "key", "server_name")
    given = [parameters.get(name) or None for name in names]
    if parameters.get("protocol") != "https" and not any(given):
        return None
    return Tls(*given)
