"""HTTP server of the dashboard: GET only, nothing loaded from elsewhere, nothing kept.

Each request opens the source that its sender may read; `Opener` decides. The server itself has no
rights: a page shows what that source returns.
"""

from __future__ import annotations

import re
import threading
import traceback
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
from elasticjob_cli.dashboard.sources import MAX_LINES, Logs, Source, Unavailable
from elasticjob_cli.log_lines import LogOptions
from elasticjob_cli.output import show_error

REQUEST_SECONDS = 10.0
"""Maximum wait for a request's bytes, and for its reader."""
MAX_REQUESTS = 32
"""Maximum number of requests at a time; others are refused."""
MAX_CONNECTIONS = 256
"""Maximum number of connections at a time, also of senders that are slow; others are closed."""
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
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
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
        said = error_page(error.status, error.status.phrase, str(error), depth, source.title)
        return Answer(error.status, said)


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
            logs = _end_of_log(source, namespace, name)
            return job_page(found, logs, source.title, now)
        case ["jobs", namespace, name, "logs", ""]:
            options = _options(query)
            logs = source.logs(_label(namespace), _label(name), options)
            return logs_page(namespace, name, logs, options, source.title)
    raise Unavailable(HTTPStatus.NOT_FOUND, "There is no such page.")


def _end_of_log(source: Source, namespace: str, name: str) -> Logs:
    """Return the last lines of a job's output; a viewer who may not read them gets the reason."""
    try:
        return source.logs(namespace, name, LogOptions(tail=TAIL_OF_JOB))
    except Unavailable as error:
        return Logs((), (), str(error))


def _label(word: str) -> str:
    """Return a namespace or name. Raises `Unavailable`."""
    if not _LABEL.fullmatch(word):
        raise Unavailable(HTTPStatus.NOT_FOUND, "Namespaces and names of jobs are DNS labels.")
    return word


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
    """Path that answers whether the server runs, to any host; empty for none."""

    def __init__(self, address: tuple[str, int], opener: Opener, hosts: tuple[str, ...]) -> None:
        super().__init__(address, _Handler)
        self.opener = opener
        self.hosts = frozenset(hosts)
        self.places = threading.BoundedSemaphore(MAX_REQUESTS)
        self.connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Bind the socket, without the look-up of a name that HTTPServer makes."""
        TCPServer.server_bind(self)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, or close it if there are too many."""
        if self.connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that its sender broke off."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = REQUEST_SECONDS
    server_version = "elasticjob"
    sys_version = ""

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_HEAD(self) -> None:
        self._send(self._answer())

    def _answer(self) -> Answer:
        if self.path == self.server.health_path:
            return Answer(HTTPStatus.OK, "ok\n", "text/plain")
        if host_name(self.headers.get("Host", "")) not in self.server.hosts:
            return _plain(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
        if not self.server.places.acquire(blocking=False):
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at a time")
        try:
            try:
                parts = urlsplit(self.path)
            except ValueError:
                return _plain(HTTPStatus.BAD_REQUEST, "this is no address of a page")
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            headers = {name.lower(): text for name, text in self.headers.items()}
            request = Request(parts.path, headers, str(self.client_address[0]))
            try:
                source, path = self.server.opener(request)
            except Denied as refusal:
                return _plain(refusal.status, str(refusal))
            return answer(source, path, query)
        except Exception:  # the top loop of a request: the others go on
            show_error(f"cannot answer a request:\n{traceback.format_exc()}")
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log has the error")
        finally:
            self.server.places.release()

    def _send(self, found: Answer) -> None:
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
        said = _plain(status, status.phrase)
        self._send(Answer(said.status, said.body, said.content_type, more))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses contain the token, and foreign text."""


def _plain(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, f"{status} {status.phrase}: {message}\n", "text/plain")
