"""HTTP server for probes and Prometheus, without an HTTP library.

`/healthz` fails when the replica should be restarted. `/readyz` succeeds once it is active or
stands by. `/metrics` has its own port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST

from elasticjob_launcher.admission import Caps
from elasticjob_rendezvous.listener import Keep, Listener, listening_socket

REQUEST_SECONDS = 5.0
_MAX_HEAD_BYTES = 8192
BACKLOG = 128
CAPS = Caps(unproven=256, per_address=64)
"""Enough for the kubelet and Prometheus, which each send one request at a time."""

Check = Callable[[], str]
"""Health check: returns a description of the problem, or an empty string."""


@dataclass(slots=True)
class Health:
    """State that the probes report."""

    checks: list[Check] = field(default_factory=list)
    ready: bool = False

    def problems(self) -> list[str]:
        return [problem for check in self.checks if (problem := check())]

    def answer_health(self) -> tuple[HTTPStatus, str]:
        found = self.problems()
        if found:
            return HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{problem}\n" for problem in found)
        return HTTPStatus.OK, "ok\n"

    def answer_ready(self) -> tuple[HTTPStatus, str]:
        if self.ready:
            return HTTPStatus.OK, "ok\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, "starting\n"


@asynccontextmanager
async def serve_health(
    health: Health,
    health_port: int,
    metrics: Callable[[], bytes] | None = None,
    metrics_port: int = 0,
) -> AsyncIterator[None]:
    """Serve the probes, and metrics if given. Raises OSError."""
    probes = {
        "/healthz": lambda: _text(*health.answer_health()),
        "/readyz": lambda: _text(*health.answer_ready()),
    }
    served = [(health_port, probes)]
    if metrics is not None:
        exposition = metrics
        scrape = {"/metrics": lambda: _reply(HTTPStatus.OK, CONTENT_TYPE_LATEST, exposition())}
        served.append((metrics_port, scrape))
    async with contextlib.AsyncExitStack() as stack:
        for port, pages in served:
            sock = listening_socket("", port, BACKLOG)
            listener = Listener(sock, CAPS, _Answers(pages).serve, _MAX_HEAD_BYTES)
            stack.push_async_callback(listener.close)
        yield


class _Answers:
    """Connection handler; answers one request per connection."""

    def __init__(self, pages: dict[str, Callable[[], bytes]]) -> None:
        self._pages = pages

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        """Answer a request, the connection's only one."""
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        page = self._pages.get(rest.partition(" ")[0].partition("?")[0])
        if page is None or method != "GET":
            return _text(HTTPStatus.NOT_FOUND, f"no such page; pages: {', '.join(self._pages)}\n")
        return page()


def _text(code: HTTPStatus, body: str) -> bytes:
    return _reply(code, "text/plain; charset=utf-8", body.encode())


def _reply(code: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {code.value} {code.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
