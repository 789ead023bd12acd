"""python-etcd client for the rendezvous, with corrected retry and failover behaviour."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from functools import partial
from typing import Any

import etcd
import urllib3
import urllib3.connection

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousUnsupportedError,
)
from elasticjob_rendezvous.dynamic.endpoint import is_ipv6
from elasticjob_rendezvous.etcd.reachability import socket_path
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger(__name__)

DEFAULT_PORT = 2379
DEFAULT_READ_TIMEOUT_SECONDS = 5


class EtcdClient(etcd.Client):  # type: ignore[misc]
    """Client of one or more servers and of the servers that they advertise.

    python-etcd repeats a request whose reply was lost, even a compare-and-set, which then fails
    although it was applied; and it never again uses a server that failed once. This client sends
    each request once, and after a failure the next request goes to the next server.

    Raises:
        etcd.EtcdException: no server answers.
        RendezvousUnsupportedError: all servers answer, and none has the v2 API.
    """

    http: urllib3.PoolManager

    def __init__(
        self, endpoints: list[tuple[str, int]], server_name: str | None = None, **options: Any
    ) -> None:
        self._servers: list[str] = []
        self._pid = os.getpid()
        self._socket = endpoints[0][0] if endpoints[0][0].startswith("/") else None
        if self._socket is not None:
            endpoints = [("localhost", DEFAULT_PORT)]  # the name in requests, which etcd ignores
        host, port = endpoints[0]
        super().__init__(_bracketed(host), port, allow_reconnect=False, **options)
        self._use_socket()
        self.http.connection_pool_kw["retries"] = urllib3.Retry(connect=1, read=False, redirect=3)
        if server_name:
            names = {"server_hostname": server_name, "assert_hostname": server_name}
            self.http.connection_pool_kw.update(names)
        self._servers = [f"{self.protocol}://{_bracketed(h)}:{p}" for h, p in endpoints]
        self._update_servers()

    def api_execute(
        self,
        path: str,
        method: str,
        params: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        self.disown()
        try:
            return super().api_execute(path, method, params=params, timeout=timeout)
        except etcd.EtcdWatchTimedOut:
            raise
        except etcd.EtcdConnectionFailed:
            self.turn()
            raise

    def disown(self) -> None:
        """Open new connections in a forked process: the existing ones belong to the parent."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.http = urllib3.PoolManager(**self.http.connection_pool_kw)
            self._use_socket()

    def _use_socket(self) -> None:
        """Send all requests to the unix socket, if the endpoint is one."""
        if self._socket is not None:
            pool = partial(_SocketPool, self._socket)
            self.http.pool_classes_by_scheme = {"http": pool}  # type: ignore[dict-item]

    def turn(self) -> None:
        """Switch to the next server after a failure of the current one."""
        if len(self._servers) > 1:
            self._servers.append(self._servers.pop(0))
            self._base_uri = self._servers[0]
            log.info("switching to the etcd server %s", self._base_uri)

    def _update_servers(self) -> None:
        without: list[str] = []
        for attempt in range(len(self._servers)):
            try:
                advertised = self.machines
            except etcd.EtcdException:
                if version := self._version_without_v2():
                    without.append(f"{self._base_uri} (etcd {version})")
                if len(without) == len(self._servers):
                    raise RendezvousUnsupportedError(_no_v2(without)) from None
                if attempt == len(self._servers) - 1:
                    raise
                self.turn()
            else:
                if self._socket is None:
                    self._servers += [url for url in advertised if url not in self._servers]
                return

    def _version_without_v2(self) -> str | None:
        """Return the version of an etcd that answers but has no v2 API; None in all other cases.

        A proxy in front of an unreachable etcd may also answer 404, but without etcd's version.
        """
        try:
            keys, version = (
                self.http.request(
                    "GET", f"{self._base_uri}{path}", timeout=self.read_timeout, retries=False
                )
                for path in (f"{self.version_prefix}/machines", "/version")
            )
            versions = json.loads(version.data)
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return None
        found = versions.get("etcdserver") if isinstance(versions, dict) else None
        return str(found) if found and (keys.status, version.status) == (404, 200) else None


class _SocketConnection(urllib3.connection.HTTPConnection):
    """HTTP connection over a unix socket."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self._path = path

    def _new_conn(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        timeout = self.timeout
        connection.settimeout(timeout if isinstance(timeout, int | float) else None)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise urllib3.exceptions.NewConnectionError(self, f"{self._path}: {error}") from error
        return connection


class _SocketPool(urllib3.HTTPConnectionPool):
    """Connections to one unix socket."""

    def __init__(self, path: str, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self.ConnectionCls = partial(_SocketConnection, path)  # type: ignore[assignment]


def parse_endpoints(text: str | None) -> list[tuple[str, int]]:
    """Parse `host`, `host:port`, `[v6]:port` or `v6:port`, or a comma-separated list.

    Empty means localhost. `unix:///path` gives the path and 0; it must be the only endpoint.

    Raises:
        ValueError: an endpoint is malformed; the message names it.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if (path := socket_path(parts[0] if parts else "")) is not None:
        if len(parts) > 1 or not path.startswith("/"):
            raise ValueError(f"a unix socket must be unix:///path, and alone: {echoed(text)}")
        return [(path, 0)]
    return [_parse_endpoint(part) for part in parts or ["localhost"]]


def _parse_endpoint(part: str) -> tuple[str, int]:
    host, colon, port = part, "", ""
    if not part.endswith("]") and ":" in part:
        host, colon, port = part.rpartition(":")
        if is_ipv6(part) and not is_ipv6(host.removeprefix("[").removesuffix("]")):
            host, colon, port = part, "", ""
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(f"the rendezvous endpoint must be host[:port], not {echoed(part)}")
    if not colon:
        return host, DEFAULT_PORT
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535:
        raise ValueError(f"the port of the rendezvous endpoint {echoed(part)} must be 0 to 65535")
    return host, int(port)


def create_client(parameters: RendezvousParameters) -> EtcdClient:
    """Create a client from rendezvous parameters.

    Settings: `protocol` (http or https), `cacert`, `cert` and `key` (files), `server_name` (the
    name in the servers' certificates), `username` and `password`, `read_timeout` in seconds.

    Raises:
        ValueError: a setting is malformed.
        RendezvousConnectionError: no server answers.
        RendezvousUnsupportedError: etcd answers but has no v2 API.
    """
    protocol = str(parameters.get("protocol") or "http")
    if protocol not in ("http", "https"):
        raise ValueError(f"the etcd protocol must be http or https, not {echoed(protocol)}")
    cert, key = parameters.get("cert"), parameters.get("key")
    read_timeout = parameters.get_as_int("read_timeout", DEFAULT_READ_TIMEOUT_SECONDS)
    if not read_timeout or read_timeout < 1:
        raise ValueError(f"the setting 'read_timeout' must be at least 1, not {read_timeout}")
    try:
        return EtcdClient(
            parse_endpoints(parameters.endpoint),
            protocol=protocol,
            cert=(cert, key) if cert and key else cert,
            ca_cert=parameters.get("cacert"),
            server_name=parameters.get("server_name"),
            username=parameters.get("username"),
            password=parameters.get("password"),
            read_timeout=read_timeout,
        )
    except (etcd.EtcdException, urllib3.exceptions.HTTPError, OSError) as error:
        raise RendezvousConnectionError(
            f"no etcd with the v2 API at {protocol}://{parameters.endpoint}: {str(error).strip()}"
        ) from error


def _no_v2(servers: list[str]) -> str:
    return (
        f"etcd answers at {', '.join(servers)}, but has no v2 API there: 3.4 and 3.5 need the "
        "option --enable-v2, 3.6 and newer never have it. Start etcd 3.4 or 3.5 with that option, "
        "or use the backend for v3 (ElasticJob's etcd, torchrun's elasticjob)"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
