"""TCP listener with caps on its connections, and the log of refused peers.

A connection is unproven until its handler calls `keep`. `elasticjob_launcher.admission` decides
which connections have a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable

from elasticjob_launcher.admission import Admission, Caps
from elasticjob_rendezvous.token_bucket import TokenBucket

log = logging.getLogger(__name__)

ACCEPT_AGAIN_SECONDS = 0.5
CLOSE_SECONDS = 5.0
"""Maximum time in which a peer takes the rest of its answer."""
MAX_ACCEPTS = 64
"""Maximum accepted connections before other work: a burst must not delay heartbeats."""
BURST_LINES = 10
LINE_SECONDS = 10.0


class RefusalLog:
    """Log of refused peers with one token bucket for all listeners of a process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bucket = TokenBucket(BURST_LINES, LINE_SECONDS)
        self._dropped = 0

    def refused(self, logger: logging.Logger, peer: object, reason: object) -> None:
        """Log a refused peer, or count it until there is a token."""
        self.warn(logger, f"refused a connection from {peer}", reason)

    def warn(self, logger: logging.Logger, fact: str, cause: object) -> None:
        """Log a fact about a peer and its cause, or count it until there is a token."""
        with self._lock:
            if not self._bucket.take(self._clock()):
                self._dropped += 1
                return
            dropped, self._dropped = self._dropped, 0
        more = f" (and {dropped} other refusals that were not logged)" if dropped else ""
        logger.warning("%s: %s%s", fact, cause, more)


refusals = RefusalLog()

Keep = Callable[[], bool]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Keep], Awaitable[None]]


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket; an empty host means all addresses of both families.

    Raises:
        OSError: the port is in use, or the address is not local.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)


class Listener:
    """Listener of one socket, on the running loop.

    `handle` serves one connection, until it returns or is cancelled; its third argument counts
    the connection as kept and returns False if it must end instead. `limit_bytes` is the maximum
    size of a line, `accept_again_seconds` the pause after a connection that could not be accepted.
    The listener closes each connection and in the end the socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        caps: Caps,
        handle: Handler,
        limit_bytes: int,
        accept_again_seconds: float = ACCEPT_AGAIN_SECONDS,
    ) -> None:
        sock.setblocking(False)
        self._socket: socket.socket | None = sock
        self._handle = handle
        self._limit_bytes = limit_bytes
        self._accept_again_seconds = accept_again_seconds
        self._admission: Admission[asyncio.Task[None]] = Admission(caps)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._loop = asyncio.get_running_loop()
        self._resume()

    async def close(self) -> None:
        """Stop listening; cancel the handlers and wait for their end."""
        if self._socket is not None:
            self._pause()
            self._socket.close()
            self._socket = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _resume(self) -> None:
        if self._socket is not None and not self._accepting:
            self._accepting = True
            # Not asyncio.start_server: closing it while it accepts loses the new socket.
            self._loop.add_reader(self._socket, self._accept, self._socket)

    def _pause(self) -> None:
        if self._socket is not None and self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._socket)

    def _accept(self, listener: socket.socket) -> None:
        """Accept pending connections; others follow in the loop's next iteration."""
        for _ in range(MAX_ACCEPTS):
            if self._admission.paused:
                self._pause()
                return
            try:
                connection, peer = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the peer has disconnected
            except OSError as error:  # for example too many open files
                refusals.warn(log, "could not accept a peer's connection", error)
                # A pending connection would otherwise cause a busy loop.
                self._pause()
                self._loop.call_later(self._accept_again_seconds, self._resume)
                return
            self._begin(connection, str(peer[0]))

    def _begin(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, connection))
        crowded = self._admission.arrive(task, address)
        if crowded is not None:
            crowded.cancel()
            refusals.refused(log, address, "too many connections that prove nothing")

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # the handler of a task that was cancelled early did not take it over
        self._tasks.discard(task)
        self._admission.leave(task)
        if not self._accepting and not self._admission.paused:
            self._resume()

    async def _serve(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        reader, writer = await asyncio.open_connection(sock=connection, limit=self._limit_bytes)
        try:
            await self._handle(reader, writer, functools.partial(self._admission.keep, task))
        except asyncio.CancelledError:
            if self._socket is not None:  # to make room, at once
                writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await writer.wait_closed()
            writer.transport.abort()
