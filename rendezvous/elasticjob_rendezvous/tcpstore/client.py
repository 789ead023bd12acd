"""TCPStore client in plain Python, for torch's servers and ours; with torch's methods.

Unlike torch's client, it reconnects with the next call after a connection broke: the store's host
may return, perhaps at another address and without its keys.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from elasticjob_rendezvous.tcpstore.wire import (
    I64,
    KEY_PREFIX,
    NOT_READY,
    READY,
    STOP_WAITING,
    U8,
    U32,
    U64,
    WAIT_CANCELED,
    Malformed,
    Query,
    block,
    hello,
    keys_of,
    query,
    stored,
    value_of,
)

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=60)
ANSWER_SECONDS = 30.0
"""Timeout of an answer that needs no wait on the server."""
UNHEARD_MS = 10_000
"""Maximum time for which sent data may stay unacknowledged."""
CANCEL_SECONDS = 10.0
CONNECT_SECONDS = 5.0
"""Timeout of one attempt: the address of a lost host may never answer."""
RETRY_SECONDS = 0.2

T = TypeVar("T")


class StoreTimeout(TimeoutError):
    """Timeout of a wait for keys."""


class StoreGone(ConnectionError):
    """Lost connection to the store; the next call reconnects."""


class TCPStore:
    """Thread-safe client with the methods of `torch.distributed.TCPStore`.

    One call at a time: a wait for a key blocks all other calls, so use separate clients for calls
    that must not be blocked. A forked process opens its own connection.

    Args:
        host, port: address of the server; the name is resolved for every connection.
        timeout: timeout of `get`, `wait` and `multi_get`, and of the first connection.
        answer_seconds: timeout of an answer that needs no wait on the server.

    Raises:
        StoreGone: no server answers within the timeout.
    """

    def __init__(
        self,
        host: str,
        port: int,
        timeout: timedelta = TIMEOUT,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.host, self.port = host, port
        self._timeout = timeout
        self._answer_seconds = answer_seconds
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._closed = False
        self.connections = 0
        """Number of connections made so far."""
        self._connect_within(timeout.total_seconds())

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    @property
    def connected(self) -> bool:
        """True if there is a connection that is not known to be broken."""
        self._disown()
        if not self._lock.acquire(blocking=False):
            return self._socket is not None
        try:
            return self._held() is not None
        finally:
            self._lock.release()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def close(self) -> None:
        """Disconnect from the server; a pending call fails."""
        self._disown()
        self._closed = True
        self._drop()

    # -- torch's methods --------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._send(query(Query.SET, block(stored(key)), block(value_of(value))))

    def append(self, key: str, value: str | bytes) -> None:
        self._send(query(Query.APPEND, block(stored(key)), block(value_of(value))))

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value. Raises StoreTimeout."""

        def exchange(wire: _Wire) -> bytes:
            self._await(wire, [key], self._timeout)
            wire.send(query(Query.GET, block(stored(key))))
            return wire.block()

        return self._call(exchange)

    def add(self, key: str, amount: int) -> int:
        parts = block(stored(key)), I64.pack(amount)
        return self._request(query(Query.ADD, *parts), lambda wire: wire.number(I64))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Return the resulting value; for a missing key, a non-empty `expected`."""
        parts = block(stored(key)), block(value_of(expected)), block(value_of(desired))
        return self._request(query(Query.COMPARE_SET, *parts), _Wire.block)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys exist."""

        def answer(wire: _Wire) -> bool:
            return wire.one_of(READY, NOT_READY) == READY

        return self._request(query(Query.CHECK, keys_of([stored(key) for key in keys])), answer)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises StoreTimeout."""
        limit = self._timeout if timeout is None else timeout
        self._call(lambda wire: self._await(wire, keys, limit))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it existed."""
        deleted = self._request(
            query(Query.DELETE_KEY, block(stored(key))), lambda wire: wire.number(I64)
        )
        return deleted == 1

    def num_keys(self) -> int:
        return self._request(query(Query.NUM_KEYS), lambda wire: wire.number(I64))

    def list_keys(self) -> list[str]:
        """Return all keys of the store; torch's servers support this since about 2.10."""

        def answer(wire: _Wire) -> list[str]:
            found = [wire.block() for _ in range(wire.number(U64))]
            return [key.removeprefix(KEY_PREFIX).decode(errors="replace") for key in found]

        return self._request(query(Query.LIST_KEYS), answer)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all keys and return their values. Raises StoreTimeout."""

        def exchange(wire: _Wire) -> list[bytes]:
            self._await(wire, keys, self._timeout)
            wire.send(query(Query.MULTI_GET, keys_of([stored(key) for key in keys])))
            return [wire.block() for _ in keys]

        return self._call(exchange) if keys else []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        parts = [block(stored(key)) + block(value_of(value)) for key, value in pairs]
        self._send(query(Query.MULTI_SET, U64.pack(len(parts)), *parts))

    # -- calls --------------------------------------------------------------------------

    def _request(self, request: bytes, answer: Callable[[_Wire], T]) -> T:
        def exchange(wire: _Wire) -> T:
            wire.send(request)
            return answer(wire)

        return self._call(exchange)

    def _send(self, request: bytes) -> None:
        """Send a request that has no answer, and confirm its arrival with a ping.

        torch's client does not confirm, and loses writes to a server that is gone.
        """
        nonce = secrets.randbits(32)

        def exchange(wire: _Wire) -> None:
            wire.send(request + query(Query.PING, U32.pack(nonce)))
            if wire.number(U32) != nonce:
                raise Malformed("the store answered another request")

        self._call(exchange)

    def _await(self, wire: _Wire, keys: Sequence[str], limit: timedelta) -> None:
        """Wait for keys on the server; cancel the wait after `limit`."""
        wire.send(query(Query.WAIT, keys_of([stored(key) for key in keys])))
        if wire.arrives_within(limit.total_seconds()):
            wire.one_of(STOP_WAITING)
            return
        wire.send(query(Query.CANCEL_WAIT))
        if wire.one_of(STOP_WAITING, WAIT_CANCELED) == STOP_WAITING:
            wire.one_of(WAIT_CANCELED)
            return  # set before the cancellation arrived
        seconds = limit.total_seconds()
        raise StoreTimeout(f"{', '.join(keys)} not set within {seconds:g} s")

    def _call(self, exchange: Callable[[_Wire], T]) -> T:
        """Perform one exchange. A failed one is not repeated: the server may have executed it."""
        self._disown()
        with self._lock:
            with self._explained("cannot be reached"):
                wire = self._wire(self._held() or self._connected())
            with self._explained("failed to answer"):
                try:
                    return exchange(wire)
                except StoreTimeout:
                    raise
                except BaseException:  # a late answer would be read as that of the next request
                    self._drop()
                    raise

    @contextlib.contextmanager
    def _explained(self, fault: str) -> Iterator[None]:
        try:
            yield
        except StoreTimeout:
            raise
        except (OSError, Malformed) as error:
            raise StoreGone(f"the store at {self.host}:{self.port} {fault}: {error}") from error

    def _held(self) -> socket.socket | None:
        """Return the connection; None if the server has closed it since the last call."""
        held = self._socket
        if held is None:
            return None
        try:
            held.settimeout(0.0)
            held.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return held
        except OSError as error:
            log.debug("lost the connection to the store at %s:%d: %s", self.host, self.port, error)
        self._drop()  # closed, or unexpected data
        return None

    def _connect_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self._lock, self._explained("cannot be reached"):
                    self._connected()
                return
            except StoreGone:
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise
            time.sleep(RETRY_SECONDS)

    def _connected(self) -> socket.socket:
        if self._closed:
            raise OSError("this client is closed")
        seconds = min(CONNECT_SECONDS, self._answer_seconds)
        try:
            made = socket.create_connection((self.host, self.port), seconds)
        except UnicodeError as error:  # an empty part, or one that is too long
            raise OSError(f"{self.host!r} is not the name of a host: {error}") from error
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(made)
            nonce, wire = secrets.randbits(32), self._wire(made)
            wire.send(hello(nonce))
            if wire.number(U32, seconds) != nonce:
                raise Malformed("not a TCPStore, or one older than torch 2.4")
        except BaseException:
            made.close()
            raise
        self._socket = made
        self.connections += 1
        return made

    def _wire(self, connection: socket.socket) -> _Wire:
        return _Wire(connection, self._answer_seconds)

    def _disown(self) -> None:
        """Give up the connection in a forked process: it belongs to the parent."""
        if self._pid == os.getpid():
            return
        self._pid, self._lock = os.getpid(), threading.Lock()
        held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def _drop(self) -> None:
        held, self._socket = self._socket, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)  # wakes a blocked reader
            held.close()


class _Wire:
    """Socket wrapper that reads and writes complete protocol fields."""

    def __init__(self, connection: socket.socket, answer_seconds: float) -> None:
        self._socket = connection
        self._answer_seconds = answer_seconds

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._answer_seconds)
        self._socket.sendall(data)

    def arrives_within(self, seconds: float) -> bool:
        """Return True if data arrives within the timeout; leave the data unread."""
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the server ended the connection")
        except TimeoutError:
            return False
        return True

    def number(self, form: struct.Struct, seconds: float | None = None) -> int:
        """Read a number; `seconds` replaces the timeout of an answer."""
        within = self._answer_seconds if seconds is None else seconds
        return int(form.unpack(self._exactly(form.size, within))[0])

    def block(self) -> bytes:
        return self._exactly(self.number(U64), self._answer_seconds)

    def one_of(self, *words: int) -> int:
        found = self.number(U8, CANCEL_SECONDS)
        if found not in words:
            raise Malformed(f"the store answered {found} instead of one of {words}")
        return found

    def _exactly(self, size: int, seconds: float) -> bytes:
        self._socket.settimeout(seconds)
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("the server ended the connection")
            data += part
        return bytes(data)


def _keep_alive(made: socket.socket) -> None:
    """Enable keep-alives, which detect the loss of the server's machine.

    Detection takes about 30 s during a wait for a key, and 10 s while data is unacknowledged.
    """
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
