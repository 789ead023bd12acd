"""HTTP server of the dashboard: GET only, nothing loaded from elsewhere, nothing kept.

Each request opens the source that its sender may read; `Opener` decides. The server itself has no
rights: a page shows what that source returns.
"""

from __future__ import annotations

import io
import re
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from elasticjob_cli.dashboard import assets
from elasticjob_cli.dashboard.pages import (
    TAIL,
    TAIL_OF_JOB,
    error_page,
    forbidden_page,
    job_page,
    jobs_page,
    logs_page,
)
from elasticjob_cli.dashboard.sources import MAX_LINES, Json, Logs, Source, Unavailable
from elasticjob_cli.errors import BadInput
from elasticjob_cli.kubectl import checked_name
from elasticjob_cli.log_lines import LogOptions
from elasticjob_cli.output import show_error

REQUEST_SECONDS = 10.0
"""Maximum duration of the reads of a request, and of the writes of its answer."""
PLACE_SECONDS = 5.0
"""Maximum wait of a request for the end of others."""
MAX_REQUEST = 64 << 10
"""Maximum size of a request."""
MAX_CONNECTIONS = 256
"""Maximum number of connections at a time, also of senders that are slow; others are closed."""
MAX_OF_PEER = 64
"""Maximum number of them that have the same address, so that one sender cannot use all."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Hosts of an address that only this machine, or a tunnel to it, has."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: no inline script or style, no other origin, no frame, no copy."""
FILES = {
    "style.css": ("text/css", assets.STYLE),
    "page.js": ("text/javascript", assets.SCRIPT),
    "icon.svg": ("image/svg+xml", assets.ICON),
}
_POD = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Request:
    """Request after its method and its Host header were checked."""

    path: str
    headers: Mapping[str, str]
    """By name in lower case."""
    peer: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request."""

    status: HTTPStatus
    body: str
    content_type: str = "text/html"
    headers: tuple[tuple[str, str], ...] = ()


class Denied(Exception):
    """Refusal of a request."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


Opener = Callable[[Request], tuple[Source, str]]
"""Function that returns the source of a request and its path below the root; raises `Denied`."""


def host_name(header: str) -> str:
    """Return the host of a Host header, in lower case and without its port."""
    return re.sub(r":[0-9]{1,5}$", "", header.strip().lower())


def answer(source: Source, path: str, query: Mapping[str, str]) -> Answer:
    """Return the answer to a request for a path below the root."""
    words = [unquote(word) for word in path.split("/")]
    depth = len(words) - 1
    try:
        if path in FILES:
            content_type, text = FILES[path]
            return Answer(HTTPStatus.OK, text, content_type)
        if words[-1] and words[0] in ("jobs", "namespaces"):
            return _moved(f"{quote(words[-1], safe='')}/")
        return Answer(HTTPStatus.OK, _page(source, words, query))
    except _Moved as found:
        return _moved(found.target)
    except Unavailable as error:
        body = error_page(error.status, error.status.phrase, str(error), depth, source.title)
        return Answer(error.status, body)


class _Moved(Exception):
    """Redirection, relative to the page."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


def _moved(target: str) -> Answer:
    return Answer(HTTPStatus.SEE_OTHER, "", "text/plain", (("Location", target),))


def _page(source: Source, words: list[str], query: Mapping[str, str]) -> str:
    """Return the page of a path in words. Raises `Unavailable`."""
    now = datetime.now(UTC)
    match words:
        case [""] if query.get("namespace"):
            raise _Moved(f"namespaces/{_label(query['namespace'])}/")
        case [""]:
            try:
                return jobs_page(source.jobs(None), source.title, None, now)
            except Unavailable as error:
                if error.status is not HTTPStatus.FORBIDDEN:
                    raise
                return forbidden_page(str(error), source.title)
        case ["namespaces", namespace, ""]:
            return jobs_page(source.jobs(_label(namespace)), source.title, namespace, now)
        case ["jobs", namespace, name, ""]:
            found = source.details(_label(namespace), _label(name))
            logs = _end_of_log(source, namespace, name, found.document)
            return job_page(found, logs, source.title, now)
        case ["jobs", namespace, name, "logs", ""]:
            options = _options(query)
            logs = source.logs(_label(namespace), _label(name), options)
            return logs_page(namespace, name, logs, options, source.title)
    raise Unavailable(HTTPStatus.NOT_FOUND, "There is no such page.")


def _end_of_log(source: Source, namespace: str, name: str, document: Json) -> Logs:
    """Return the last lines of a job's output; a viewer who may not read them gets the reason."""
    try:
        return source.logs(namespace, name, LogOptions(tail=TAIL_OF_JOB), document)
    except Unavailable as error:
        return Logs((), (), str(error))


def _label(word: str) -> str:
    """Return a namespace or name. Raises `Unavailable`."""
    try:
        return checked_name(word)
    except BadInput:
        text = "Namespaces and names of jobs are DNS labels."
        raise Unavailable(HTTPStatus.NOT_FOUND, text) from None


def _options(query: Mapping[str, str]) -> LogOptions:
    """Return the choice of log lines of an address. Raises `Unavailable`."""
    pod = query.get("pod") or None
    if pod is not None and not _POD.fullmatch(pod):
        raise Unavailable(HTTPStatus.NOT_FOUND, "The pod of an address must be a pod's name.")
    tail = _number(query, "tail", TAIL)
    return LogOptions(pod=pod, rank=_number(query, "rank", None), tail=min(tail or 1, MAX_LINES))


def _number(query: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = query.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise Unavailable(HTTPStatus.BAD_REQUEST, f"The {name} of an address must be a number.")
    return int(text)


class Server(ThreadingHTTPServer):
    """Server of pages.

    Args:
        address: host and port on which it listens; port 0 for a free one.
        opener: finds the source of each request.
        hosts: names that the Host header may have: the defence against DNS rebinding.
    """

    daemon_threads = True
    request_queue_size = 64
    challenge = ""
    """Value of WWW-Authenticate of answers with status 401; empty where no token is asked for."""
    health_path = ""
    """Path of the health check, admitted for any Host; empty for none."""
    max_requests = 32
    """Maximum number of requests at a time; others wait, and are refused after a while."""

    def __init__(self, address: tuple[str, int], opener: Opener, hosts: tuple[str, ...]) -> None:
        super().__init__(address, _Handler)
        self.opener = opener
        self.hosts = frozenset(hosts)
        self.places = threading.BoundedSemaphore(self.max_requests)
        self._connections: Counter[str] = Counter()
        """Number of open connections by address."""
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Bind the socket, without the name lookup that HTTPServer makes."""
        TCPServer.server_bind(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, or close it if there are too many."""
        peer = str(client_address[0])
        with self._lock:
            admitted = self._connections.total() < MAX_CONNECTIONS
            admitted = admitted and self._connections[peer] < MAX_OF_PEER
            self._connections[peer] += admitted
        if not admitted:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._release(peer)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(str(client_address[0]))

    def _release(self, peer: str) -> None:
        with self._lock:
            self._connections[peer] -= 1
            self._connections += Counter()  # without the addresses that have none

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that its sender broke off."""


class Timed(io.RawIOBase):
    """Connection whose reads, or whose writes after `restart`, end at one deadline.

    A timeout of the socket would restart with each byte of a slow peer.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._room = MAX_REQUEST
        self.restart()

    def restart(self) -> None:
        self._due = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._limit()
        found = self._link.recv_into(buffer)
        self._room -= found
        if self._room < 0:
            raise ConnectionError("the request is too large")
        return found

    def write(self, text: Any) -> int:
        """Write all."""
        rest = memoryview(text)
        while rest:
            self._limit()
            rest = rest[self._link.send(rest) :]
        return len(text)

    def _limit(self) -> None:
        left = self._due - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._link.settimeout(left)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "elasticjob"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._timed = Timed(self.connection)
        self.rfile = io.BufferedReader(self._timed)
        self.wfile = self._timed  # type: ignore[assignment]

    def do_GET(self) -> None:
        if self.path == self.server.health_path:
            self._send(Answer(HTTPStatus.OK, "ok\n", "text/plain"))
        elif host_name(self.headers.get("Host", "")) not in self.server.hosts:
            self._send(_plain(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name"))
        elif not self.server.places.acquire(timeout=PLACE_SECONDS):
            self._send(_plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at a time"))
        else:
            try:
                self._send(self._answer())  # its text is in memory until it is sent
            finally:
                self.server.places.release()

    do_HEAD = do_GET

    def _answer(self) -> Answer:
        try:
            try:
                parts = urlsplit(self.path)
            except ValueError:
                return _plain(HTTPStatus.BAD_REQUEST, "this is not the address of a page")
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            headers = {name.lower(): text for name, text in self.headers.items()}
            request = Request(parts.path, headers, str(self.client_address[0]))
            try:
                source, path = self.server.opener(request)
            except Denied as refusal:
                return _plain(refusal.status, str(refusal))
            return answer(source, path, query)
        except Exception:  # the top loop of a request: the others continue
            show_error(f"cannot answer a request:\n{traceback.format_exc()}")
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log has the error")

    def _send(self, found: Answer) -> None:
        self._timed.restart()
        body = found.body.encode(errors="replace")
        self.send_response(found.status)
        for name, text in (*HEADERS.items(), *found.headers):
            self.send_header(name, text)
        if found.status is HTTPStatus.UNAUTHORIZED and self.server.challenge:
            self.send_header("WWW-Authenticate", self.server.challenge)
        self.send_header("Content-Type", f"{found.content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that cannot be parsed, or with another method."""
        status = HTTPStatus(code)
        more: tuple[tuple[str, str], ...] = ()
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status, more = HTTPStatus.METHOD_NOT_ALLOWED, (("Allow", "GET, HEAD"),)
        answer = _plain(status, status.phrase)
        self._send(Answer(answer.status, answer.body, answer.content_type, more))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses contain the token, and foreign text."""


def _plain(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, f"{status} {status.phrase}: {message}\n", "text/plain")
