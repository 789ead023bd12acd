"""TCP listener with caps on its connections, and the log of refused peers.

A connection is unproven until its handler calls `keep`. Caps on unproven connections, in all and
per address, limit the memory that peers without credentials take. At a cap the oldest unproven
connection of the address with the most of them is closed. If no address has more than a few, as
when all members of a large job connect to a new coordinator, accepting pauses instead, and the
kernel queues them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

log = logging.getLogger(__name__)

ACCEPT_AGAIN_SECONDS = 0.5
CLOSE_SECONDS = 5.0
"""Maximum time in which a peer takes the rest of its answer."""
MAX_ACCEPTS = 64
"""Maximum accepted connections before other work: a burst must not delay heartbeats."""
FEW = 4
"""Maximum unproven connections of one address that are never closed in favour of others."""
BURST_LINES = 10
LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Caps:
    """Maximum numbers of connections.

    Args:
        unproven: unproven connections in all.
        per_address: unproven connections of one address.
        kept: kept connections in all.
        kept_per_address: kept connections of one address; None for no such cap.
    """

    unproven: int
    per_address: int
    kept: int = 0
    kept_per_address: int | None = None


class Admission:
    """Bookkeeping of one listener's connections. No I/O."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._unproven: dict[Hashable, str] = {}
        self._by_address: dict[str, dict[Hashable, None]] = {}
        self._kept: dict[Hashable, str] = {}
        self._kept_by_address: Counter[str] = Counter()

    @property
    def paused(self) -> bool:
        """True if a new connection has no place, and none is to be closed for it."""
        if len(self._unproven) < self._caps.unproven:
            return False
        return max(map(len, self._by_address.values())) <= FEW

    def arrive(self, connection: Hashable, address: str) -> Hashable | None:
        """Add a connection; return the one to close for it, which is no longer counted."""
        own = self._by_address.setdefault(address, {})
        self._unproven[connection] = address
        own[connection] = None
        if len(own) > self._caps.per_address:
            crowd = own
        elif len(self._unproven) > self._caps.unproven:
            crowd = max(self._by_address.values(), key=len)
        else:
            return None
        oldest = next(iter(crowd))
        self.leave(oldest)
        return oldest

    def keep(self, connection: Hashable) -> bool:
        """Count a connection as kept; return False if it must be closed instead."""
        address = self._unproven.get(connection)
        if address is None or len(self._kept) >= self._caps.kept:
            return False
        most = self._caps.kept_per_address
        if most is not None and self._kept_by_address[address] >= most:
            return False
        self.leave(connection)
        self._kept[connection] = address
        self._kept_by_address[address] += 1
        return True

    def leave(self, connection: Hashable) -> None:
        """Remove a connection; do nothing if it is not counted."""
        address = self._unproven.pop(connection, None)
        if address is not None:
            own = self._by_address[address]
            del own[connection]
            if not own:
                del self._by_address[address]
        address = self._kept.pop(connection, None)
        if address is not None:
            self._kept_by_address[address] -= 1
            if not self._kept_by_address[address]:
                del self._kept_by_address[address]


class RefusalLog:
    """Log of refused peers with one token bucket for all listeners of a process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(BURST_LINES)
        self._filled_at = clock()
        self._dropped = 0

    def refused(self, logger: logging.Logger, peer: object, reason: object) -> None:
        """Log a refused peer, or count it until there is a token."""
        with self._lock:
            now = self._clock()
            earned = (now - self._filled_at) / LINE_SECONDS
            self._tokens = min(self._tokens + earned, float(BURST_LINES))
            self._filled_at = now
            if self._tokens < 1.0:
                self._dropped += 1
                return
            self._tokens -= 1.0
            dropped, self._dropped = self._dropped, 0
        more = f" (and {dropped} other refusals that were not logged)" if dropped else ""
        logger.warning("refused a connection from %s: %s%s", peer, reason, more)


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
    size of a line. The listener closes each connection and in the end the socket.
    """

    def __init__(self, sock: socket.socket, caps: Caps, handle: Handler, limit_bytes: int) -> None:
        sock.setblocking(False)
        self._socket: socket.socket | None = sock
        self._handle = handle
        self._limit_bytes = limit_bytes
        self._admission = Admission(caps)
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
                log.warning("could not accept a peer's connection: %s", error)
                # A pending connection would otherwise cause a busy loop.
                self._pause()
                self._loop.call_later(ACCEPT_AGAIN_SECONDS, self._resume)
                return
            self._begin(connection, str(peer[0]))

    def _begin(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, connection))
        crowded = self._admission.arrive(task, address)
        if isinstance(crowded, asyncio.Task):
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
