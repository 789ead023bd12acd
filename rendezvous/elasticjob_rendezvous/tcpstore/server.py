"""TCPStore server in plain Python, for torch's clients and ours. Its keys end with the server.

It has its own thread: a store must answer while its process is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Hashable, Iterable

from elasticjob_rendezvous.tcpstore.memory import Memory
from elasticjob_rendezvous.tcpstore.wire import (
    I64,
    MAGIC,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
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
    keys_of,
)

log = logging.getLogger(__name__)

BACKLOG = 2048
START_SECONDS = 10.0
CLOSE_SECONDS = 5.0
HELLO_SECONDS = 30.0
"""Maximum wait for the first message of a new connection."""


class TCPStoreServer:
    """Server that listens from its creation until `close`, or until it is garbage collected.

    Args:
        host: listen address; "" means all addresses of this machine.
        port: listen port; 0 selects a free one, see `port`.

    Raises:
        OSError: the port is in use, or the address is not local.
    """

    def __init__(self, host: str = "", port: int = 0) -> None:
        self._serving = _Serving(host, port)
        self.port = self._serving.port
        weakref.finalize(self, self._serving.end).atexit = False

    @property
    def waiting(self) -> int:
        """Number of clients that wait for keys."""
        return self._serving.waiting

    def drained(self, timeout_seconds: float) -> bool:
        """Wait until no client is connected; return False after the timeout."""
        return self._serving.drained(timeout_seconds)

    def close(self) -> None:
        """Stop the server, which closes all connections and drops all keys. Idempotent."""
        self._serving.end()
        self._serving.join(CLOSE_SECONDS)


class _Serving:
    """Server implementation; separate, since its thread's reference prevents its collection."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = _listener(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._pid = os.getpid()
        self._memory = Memory()
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._gone = asyncio.Event()  # same as `_empty`, for the server's own thread
        self._empty = threading.Event()
        self._empty.set()
        serving = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(serving,), name="tcpstore", daemon=True
        )
        self._thread.start()
        if not serving.wait(START_SECONDS):
            raise OSError(f"the store at port {self.port} did not start")

    @property
    def waiting(self) -> int:
        return self._memory.waiting

    def drained(self, timeout_seconds: float) -> bool:
        return self._empty.wait(timeout_seconds)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def end(self) -> None:
        """Request the thread's end, without waiting for it; do nothing in a forked process."""
        if self._pid != os.getpid():
            return
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stop.set)

    def _run(self, serving: threading.Event) -> None:
        asyncio.run(self._serve(serving))

    async def _serve(self, serving: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._gone.set()
        server = await asyncio.start_server(self._client, sock=self._listener, backlog=BACKLOG)
        serving.set()
        await self._stop.wait()
        server.close()
        for writer in tuple(self._clients):
            writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS / 2):
                await self._gone.wait()  # handlers end with their connections

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._clients.add(writer)
        self._empty.clear()
        self._gone.clear()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await _validated(reader)
            while True:
                await self._answer(Query(await _number(reader, U8)), reader, writer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # a disconnect, the normal end of a client
        except (ValueError, TimeoutError) as error:
            log.warning("dropping client %s: %r", writer.get_extra_info("peername"), error)
        finally:
            self._clients.discard(writer)
            if not self._clients:
                self._empty.set()
                self._gone.set()
            self._memory.forget(writer)
            writer.transport.abort()

    async def _answer(
        self, kind: Query, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        memory = self._memory
        match kind:
            case Query.PING:
                writer.write(await reader.readexactly(U32.size))
            case Query.SET | Query.APPEND:
                key, value = await _key(reader), await _value(reader)
                change = memory.set if kind is Query.SET else memory.append
                _wake(change(key, value))
            case Query.COMPARE_SET:
                parts = await _key(reader), await _value(reader), await _value(reader)
                found, woken = memory.compare_set(*parts)
                writer.write(block(found))
                _wake(woken)
            case Query.GET:
                writer.write(block(memory.get(await _key(reader))))
            case Query.ADD:
                key, amount = await _key(reader), await _number(reader, I64)
                total, woken = memory.add(key, amount)
                writer.write(I64.pack(total))
                _wake(woken)
            case Query.CHECK:
                here = memory.holds(await _keys(reader))
                writer.write(U8.pack(READY if here else NOT_READY))
            case Query.WAIT:
                if memory.wait(writer, await _keys(reader)):
                    writer.write(U8.pack(STOP_WAITING))
            case Query.CANCEL_WAIT:
                memory.forget(writer)
                writer.write(U8.pack(WAIT_CANCELED))
            case Query.NUM_KEYS:
                writer.write(I64.pack(len(memory)))
            case Query.DELETE_KEY:
                writer.write(I64.pack(memory.delete(await _key(reader))))
            case Query.MULTI_GET:
                keys = await _keys(reader)
                writer.write(b"".join(block(memory.get(key)) for key in keys))
            case Query.MULTI_SET:
                for _ in range(await _count(reader, MAX_KEYS)):
                    key, value = await _key(reader), await _value(reader)
                    _wake(memory.set(key, value))
            case Query.LIST_KEYS:
                writer.write(keys_of(memory.keys()))
            case Query.VALIDATE:
                raise Malformed("validated twice")


def _listener(host: str, port: int) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=BACKLOG)


def _wake(woken: Iterable[Hashable]) -> None:
    for writer in woken:
        assert isinstance(writer, asyncio.StreamWriter)
        writer.write(U8.pack(STOP_WAITING))


async def _validated(reader: asyncio.StreamReader) -> None:
    if await _number(reader, U8) != Query.VALIDATE or await _number(reader, U32) != MAGIC:
        raise Malformed("not the TCPStore protocol")


async def _number(reader: asyncio.StreamReader, form: struct.Struct) -> int:
    return int(form.unpack(await reader.readexactly(form.size))[0])


async def _count(reader: asyncio.StreamReader, most: int) -> int:
    count = await _number(reader, U64)
    if count > most:
        raise Malformed(f"{count} is more than {most}")
    return count


async def _key(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(await _count(reader, MAX_KEY_BYTES))


async def _value(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(await _count(reader, MAX_VALUE_BYTES))


async def _keys(reader: asyncio.StreamReader) -> list[bytes]:
    return [await _key(reader) for _ in range(await _count(reader, MAX_KEYS))]
