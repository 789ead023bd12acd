"""Where etcd is reached: endpoints, TLS, and one gRPC channel to each.

Owns the choice of the current endpoint: it stays while it works, and moves to
the next when a call there failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from pyetcd.etcdrpc import rpc_pb2_grpc

from elasticjob_rendezvous.etcd.errors import InvalidConfiguration, Unavailable
from elasticjob_rendezvous.etcd.forking import use_grpc

DEFAULT_PORT = 2379

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),  # a range may be larger than any one request
    ("grpc.max_send_message_length", -1),  # the server judges, and says so
    ("grpc.keepalive_time_ms", 10_000),  # etcd closes connections that ping more often than 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a watch may be silent for hours
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In fact the time given to one connection attempt: at the address of a pod that is no more
    # nobody answers. A thousand TLS handshakes at once with one etcd take half a second.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),  # pods come back under new addresses
    ("grpc.enable_retries", 0),  # what may be repeated is decided in transport.py
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),  # pings to measure a bandwidth that we never use
)

_UNSETTLED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. Without `ca_file` the system's authorities count; a client certificate is mTLS.

    `server_name` is the name the server's certificate must carry, when it is
    not the endpoint's host. The files are read again when a connection fails
    after they changed, so that rotated certificates are picked up.
    """

    ca_file: Path | str | None = None
    cert_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None

    def contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return authorities, key and certificate as gRPC orders them."""
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
class Endpoint:
    """One etcd server: the `url` as people know it, `target` as gRPC wants it."""

    url: str
    target: str
    secure: bool


def parse_endpoint(text: str, tls: Tls | None) -> Endpoint:
    """Read `[http[s]://]host[:port]`; without a scheme, `tls` decides."""
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
    # Naming the family spares gRPC its resolver.
    return f"ipv4:{host}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"


class Link:
    """A channel to one endpoint, with etcd's services on it. It connects when first used."""

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
        """Whether the TLS files have changed since the channel was made."""
        if self._tls is None:
            return False
        try:
            return self._tls.contents() != self._secrets
        except InvalidConfiguration:  # in the middle of a rotation: what we hold is better
            return False

    def is_connected(self) -> bool:
        """Return whether the channel is connected. One that was cut off reconnects only to send."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    def is_settled(self) -> bool:
        """Whether the channel is connected, or has failed to; else it tries."""
        return self.channel.get_state(try_to_connect=True) not in _UNSETTLED

    async def settled(self) -> None:
        """Wait until the channel is connected, or has failed to."""
        while (state := self.channel.get_state(try_to_connect=True)) in _UNSETTLED:
            await self.channel.wait_for_state_change(state)


class Links:
    """The endpoints of one client, and which of them is current."""

    def __init__(
        self, endpoints: Sequence[str], tls: Tls | None, random: Callable[[], float]
    ) -> None:
        use_grpc()
        if not endpoints:
            raise InvalidConfiguration("endpoints", "(none)", "at least one must be given")
        self._tls = tls
        self._endpoints = [parse_endpoint(text, tls) for text in endpoints]
        if any(endpoint.secure for endpoint in self._endpoints):
            (tls or Tls()).contents()  # a wrong file shows at the start
        self._links: dict[Endpoint, Link] = {}
        # Clients that start together spread over the members.
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
        """Move on from `link`, unless somebody already has."""
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
