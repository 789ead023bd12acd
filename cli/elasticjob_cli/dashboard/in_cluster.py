"""Dashboard in a cluster, `python -m elasticjob_cli.dashboard.in_cluster`: it has no rights.

Each request carries its viewer's token of the API server, as the password of HTTP Basic
authentication or as a bearer token, and all reads for it are made with this token. The program
has no token of its own and keeps none.
"""

from __future__ import annotations

import argparse
import base64
import ipaddress
import json
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elasticjob_cli.dashboard.cluster_jobs import ClusterJobs
from elasticjob_cli.dashboard.server import LOOPBACK_NAMES, Denied, Opener, Request, Server
from elasticjob_cli.dashboard.sources import Source, TooLarge, Unavailable
from elasticjob_cli.output import show_at_once, show_error

CALL_SECONDS = 15.0
MAX_ANSWER = 3 << 20
"""Maximum size of an answer of the API server: twice the largest object that etcd stores.

The parsed answer is twelve times as large, and the chart's limit of memory has room for four.
"""
CHUNK = 64 << 10
CHALLENGE = 'Basic realm="ElasticJob: a token of the cluster as the password", charset="UTF-8"'
PASSED_ON = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
)
"""Statuses of the API server that are the viewer's own; others are the cluster's."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,16384}")


class ApiServer:
    """API server, read with a viewer's token.

    Args:
        url: its address, https://host:port.
        ca_file: certificate of its authority.
    """

    def __init__(self, url: str, ca_file: Path) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._tls = ssl.create_default_context(cafile=str(ca_file))

    def fetch(self, token: str, path: str, seconds: float = CALL_SECONDS) -> bytes:
        """Return the whole answer to a GET within seconds. Raises `Unavailable`."""
        due = time.monotonic() + min(seconds, CALL_SECONDS)
        headers = {"Authorization": f"Bearer {token}", "User-Agent": "elasticjob-dashboard"}
        link = HTTPSConnection(
            self._host, self._port, timeout=min(seconds, CALL_SECONDS), context=self._tls
        )
        try:
            link.request("GET", path, headers=headers)
            socket_of_answer = link.sock  # `getresponse` may drop it
            answer = link.getresponse()
            body = bytearray()
            while len(body) <= MAX_ANSWER and (chunk := answer.read1(CHUNK)):
                body += chunk
                socket_of_answer.settimeout(max(due - time.monotonic(), 0.001))
        except (OSError, HTTPException) as error:
            text = f"The API server cannot be reached: {error}"
            raise Unavailable(HTTPStatus.BAD_GATEWAY, text) from error
        finally:
            link.close()
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer.status, bytes(body))
        if len(body) > MAX_ANSWER:
            raise TooLarge(HTTPStatus.BAD_GATEWAY, "The answer of the API server is too large.")
        return bytes(body)


def _refusal(status: int, body: bytes) -> Unavailable:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        message = f"The API server answered with status {status}."
    known = next((code for code in PASSED_ON if code == status), HTTPStatus.BAD_GATEWAY)
    return Unavailable(known, message)


def token_of(headers: Mapping[str, str]) -> str | None:
    """Return the token of a request; None without a valid one."""
    kind, _, credentials = headers.get("authorization", "").strip().partition(" ")
    token = credentials.strip()
    if kind.lower() == "basic":
        try:
            pair = base64.b64decode(token, validate=True).decode()
        except ValueError:
            return None
        token = pair.partition(":")[2].strip()
    elif kind.lower() != "bearer":
        return None
    return token if _TOKEN.fullmatch(token) else None


def is_loopback(peer: str) -> bool:
    """Return True for an address of this machine or pod alone."""
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _jobs_for(api: ApiServer, token: str) -> ClusterJobs:
    return ClusterJobs(lambda path, seconds: api.fetch(token, path, seconds))


def token_opener(api: ApiServer, encrypted: bool) -> Opener:
    """Return an opener whose source reads with the token of the request.

    Without encryption only connections of the loopback are admitted; others are refused before
    their sender is asked for a token.
    """

    def opened(request: Request) -> tuple[Source, str]:
        if not encrypted and not is_loopback(request.peer):
            raise Denied(
                HTTPStatus.FORBIDDEN,
                "use `kubectl port-forward`, or set dashboard.tls.secretName of the chart",
            )
        token = token_of(request.headers)
        if token is None:
            raise Denied(HTTPStatus.UNAUTHORIZED, "a token of the cluster is required")
        return _jobs_for(api, token), request.path.removeprefix("/")

    return opened


class Certificate:
    """Certificate of the server, which is read again when its files change.

    A renewed one that cannot be read is reported, and the former one stays in use.
    """

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._files = (cert_file, key_file)
        self._changed_at = self._times()
        self._context = self._read()

    def _times(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self._files)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files)
        return context

    def _renew(self) -> None:
        try:
            now = self._times()
            if now == self._changed_at:
                return
            self._changed_at = now
            self._context = self._read()
        except OSError as error:
            show_error(f"cannot read the renewed certificate, keeping the former one: {error}")

    def wrap(self, link: socket.socket) -> socket.socket:
        """Return the encrypted connection; its handshake is made by its first read."""
        self._renew()
        return self._context.wrap_socket(link, server_side=True, do_handshake_on_connect=False)


class ClusterServer(Server):
    """Server on all addresses, encrypted if it has a certificate."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    challenge = CHALLENGE
    health_path = "/healthz"
    max_requests = 4  # the chart's limit of memory has room for these

    def __init__(
        self, port: int, opener: Opener, hosts: tuple[str, ...], certificate: Certificate | None
    ) -> None:
        self._certificate = certificate
        super().__init__(("", port), opener, hosts)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        link, peer = super().get_request()
        return (link if self._certificate is None else self._certificate.wrap(link)), peer


def main(words: list[str] | None = None) -> None:
    """Serve until the end of the process."""
    parser = argparse.ArgumentParser(prog="elasticjob_cli.dashboard.in_cluster")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-server", required=True, help="address, https://host:port")
    parser.add_argument("--ca-file", type=Path, required=True, help="authority of the API server")
    parser.add_argument("--host", action="append", default=[], help="name in browsers' addresses")
    parser.add_argument("--tls-folder", type=Path, help="folder of tls.crt and tls.key")
    options = parser.parse_args(words)
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = options.tls_folder
    certificate = None if folder is None else Certificate(folder / "tls.crt", folder / "tls.key")
    opener = token_opener(ApiServer(options.api_server, options.ca_file), certificate is not None)
    hosts = (*LOOPBACK_NAMES, *(host.lower() for host in options.host))
    with ClusterServer(options.port, opener, hosts, certificate) as server:
        text = f"serving port {server.port}, {'TLS' if certificate else 'loopback only'}"
        show_at_once(text)  # `show` needs a package that the image lacks
        server.serve_forever()


if __name__ == "__main__":
    main()
