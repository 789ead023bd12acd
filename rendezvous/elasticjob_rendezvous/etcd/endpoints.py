"""etcd endpoints: TLS settings, one gRPC channel for each, and the auth token of a client.

User and password may stand in files that are replaced while the client runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import grpc
import grpc.aio
from pyetcd.etcdrpc import rpc_pb2, rpc_pb2_grpc

from elasticjob_rendezvous.etcd.errors import InvalidConfiguration, Unavailable
from elasticjob_rendezvous.etcd.forking import use_grpc
from elasticjob_rendezvous.etcd.reachability import socket_path

DEFAULT_PORT = 2379

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),  # a range reply may exceed the request limit
    ("grpc.max_send_message_length", -1),  # the server enforces its own limit
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections with pings less than 5 s apart
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a watch may be silent for hours
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the timeout of one connection attempt: the address of a deleted pod never
    # answers. A thousand simultaneous TLS handshakes with one etcd take half a second.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),  # pods come back under new addresses
    ("grpc.enable_retries", 0),  # transport.py decides on retries
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),  # no pings for bandwidth estimation, which is of no use here
)

_UNSETTLED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings as PEM files. Without `ca_file` the system's CAs apply; `cert_file` means mTLS.

    `server_name` is the expected name in the server's certificate if it differs
    from the endpoint's host. The files are reloaded if a connection fails after
    they have changed, so that rotated certificates take effect.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return CA certificates, key and certificate, in gRPC's order."""
        if (self.cert_file is None) != (self.key_file is None):
            problem = "cert_file and key_file must be given together"
            raise InvalidConfiguration("tls", str(self.cert_file or self.key_file), problem)
        return _read(self.ca_file), _read(self.key_file), _read(self.cert_file)


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problem = f"the file can't be read: {error.strerror}"
        raise InvalidConfiguration("tls", str(path), problem) from error


@dataclass(frozen=True, slots=True)
class LoginFiles:
    """Files with etcd's user and its password.

    They are read again before each authentication, so that a rotated user takes effect once etcd
    refuses the old one, or the connection is lost.
    """

    user: Path | str
    password: Path | str

    def read(self) -> tuple[str, str] | None:
        """Return user and password of one version; None if they cannot be read now.

        A mounted Secret may change between the two reads.
        """
        try:
            before = _text(self.user)
            while True:
                password = _text(self.password)
                if (user := _text(self.user)) == before:
                    return (user, password) if user and password else None
                before = user
        except OSError:
            return None


def _text(path: Path | str) -> str:
    return Path(path).read_text(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Endpoint of one etcd server: `url` for people, `target` for gRPC."""

    url: str
    target: str
    secure: bool


def parse_endpoint(text: str, tls: Tls | None) -> Endpoint:
    """Parse `[http[s]://]host[:port]`, without a scheme https if `tls` is given, or `unix:///path`.

    A unix socket has no TLS: its folder decides who may connect.
    """
    if (path := socket_path(text)) is not None:
        if tls or not path.startswith("/"):
            problem = "a unix socket has no TLS" if tls else "it must be unix:// and a full path"
            raise InvalidConfiguration("endpoint", repr(text), problem)
        return Endpoint(text, f"unix:{quote(path)}", secure=False)
    scheme = "https" if tls else "http"
    parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
    problem = ""
    try:
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        host, port, problem = None, 0, str(error)
    if parts.scheme not in ("http", "https"):
        problem = "the scheme must be http or https"
    elif parts.path not in ("", "/") or parts.query or parts.fragment:
        problem = "it must be a host and a port, without a path"
    elif parts.scheme == "http" and tls:
        problem = "TLS is configured, so the scheme must be https"
    if problem or not host:
        raise InvalidConfiguration("endpoint", repr(text), problem or "it must name a host")
    secure = parts.scheme == "https"
    return Endpoint(f"{parts.scheme}://{parts.netloc}", _target(host, port), secure)


def _target(host: str, port: int) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return f"dns:///{host}:{port}"
    # An explicit address family bypasses gRPC's resolver.
    return f"ipv4:{host}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"


class Link:
    """gRPC channel to one endpoint, with etcd's services. It connects on first use."""

    def __init__(self, endpoint: Endpoint, tls: Tls | None) -> None:
        self.endpoint = endpoint
        self._tls = (tls or Tls()) if endpoint.secure else None
        self._secrets = self._tls.contents() if self._tls else None
        self.channel = self._open()
        self.kv: Any = rpc_pb2_grpc.KVStub(self.channel)
        self.lease: Any = rpc_pb2_grpc.LeaseStub(self.channel)
        self.watch: Any = rpc_pb2_grpc.WatchStub(self.channel)

    def _open(self) -> Any:
        if self._tls is None or self._secrets is None:
            return grpc.aio.insecure_channel(self.endpoint.target, options=_CHANNEL_OPTIONS)
        options = _CHANNEL_OPTIONS
        if self._tls.server_name:
            options += (("grpc.ssl_target_name_override", self._tls.server_name),)
        credentials = grpc.ssl_channel_credentials(*self._secrets)
        return grpc.aio.secure_channel(self.endpoint.target, credentials, options=options)

    @property
    def auth(self) -> Any:
        return rpc_pb2_grpc.AuthStub(self.channel)

    @property
    def maintenance(self) -> Any:
        return rpc_pb2_grpc.MaintenanceStub(self.channel)

    def outdated(self) -> bool:
        """Return True if the TLS files have changed since the channel was created."""
        if self._tls is None:
            return False
        try:
            return self._tls.contents() != self._secrets
        except InvalidConfiguration:  # rotation in progress: keep the loaded files
            return False

    def is_connected(self) -> bool:
        """Return True if the channel is connected. After a disconnect only a send reconnects it."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    def is_settled(self) -> bool:
        """Return True if the channel is connected or failed to connect; else start connecting."""
        return self.channel.get_state(try_to_connect=True) not in _UNSETTLED

    async def settled(self) -> None:
        """Wait until the channel is connected or has failed to connect."""
        while (state := self.channel.get_state(try_to_connect=True)) in _UNSETTLED:
            await self.channel.wait_for_state_change(state)


class Links:
    """Endpoints of one client, with the choice of the current one."""

    def __init__(
        self, endpoints: Sequence[str], tls: Tls | None, random: Callable[[], float]
    ) -> None:
        use_grpc()
        if not endpoints:
            raise InvalidConfiguration("endpoints", "(none)", "at least one must be given")
        self._tls = tls
        self._endpoints = [parse_endpoint(text, tls) for text in endpoints]
        if any(endpoint.secure for endpoint in self._endpoints):
            (tls or Tls()).contents()  # report an invalid file at once
        self._links: dict[Endpoint, Link] = {}
        # Spread clients that start together over the etcd members.
        self._index = int(random() * len(self._endpoints))
        self._closed = False

    def __len__(self) -> int:
        return len(self._endpoints)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(endpoint.url for endpoint in self._endpoints)

    def current(self) -> Link:
        use_grpc()
        endpoint = self._endpoints[self._index]
        if self._closed:
            raise Unavailable("request", endpoint.url, "this client was closed")
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = Link(endpoint, self._tls)
        return link

    async def failed(self, link: Link) -> None:
        """Switch from `link` to the next endpoint, unless another call already has."""
        if link.endpoint == self._endpoints[self._index]:
            self._index = (self._index + 1) % len(self._endpoints)
        if link.outdated() and self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]
            await link.channel.close()

    async def close(self) -> None:
        self._closed = True
        while self._links:
            _, link = self._links.popitem()
            await link.channel.close()


Metadata = tuple[tuple[str, str], ...]

_HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Metadata that makes an etcd server without a leader fail requests and streams at once."""

_NOT_ENABLED = "etcdserver: authentication is not enabled"


class Token:
    """Cache of the token. With `user` None, requests carry no token.

    `files` replace user and password before each authentication, if they can be read.
    """

    def __init__(
        self, user: str | None, password: str | None, files: LoginFiles | None = None
    ) -> None:
        self.user = user
        self.password = password or ""
        self._files = files
        self._metadata: Metadata | None = _HAS_LEADER if user is None else None
        self._lock = asyncio.Lock()

    async def metadata(self, link: Link, timeout_seconds: float) -> Metadata:
        """Return the metadata of a request, after authentication on `link` if necessary."""
        if self.user is not None and not link.is_connected():
            self._metadata = None  # the next server at this endpoint may have lost its data
        if self._metadata is not None:
            return self._metadata
        async with asyncio.timeout(timeout_seconds), self._lock:
            if self._metadata is None:  # another call may have fetched one
                self._metadata = await self._authenticate(link, timeout_seconds)
            return self._metadata

    async def _authenticate(self, link: Link, timeout_seconds: float) -> Metadata:
        if self._files is not None and (found := self._files.read()) is not None:
            self.user, self.password = found
        request = rpc_pb2.AuthenticateRequest(name=self.user, password=self.password)
        try:
            reply = await link.auth.Authenticate(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if (error.details() or "").startswith(_NOT_ENABLED):
                return _HAS_LEADER  # if it is enabled later, etcd refuses a missing token as stale
            raise
        return (*_HAS_LEADER, ("token", reply.token))

    def is_absent(self, metadata: Metadata) -> bool:
        """Return True if a request of this user carried no token, as authentication was off.

        Once it is enabled, etcd refuses such a request as forbidden if the client has a
        certificate.
        """
        return self.user is not None and metadata == _HAS_LEADER

    def forget(self, metadata: Metadata) -> bool:
        """Drop a refused or unanswered token; return False if the client uses no tokens."""
        if self.user is None:
            return False
        if self._metadata == metadata:  # otherwise it has already been replaced
            self._metadata = None
        return True
