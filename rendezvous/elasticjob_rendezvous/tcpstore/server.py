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
from collections.abc import Hashable, Iterable, Iterator, Sequence

from elasticjob_launcher.admission import Caps
from elasticjob_rendezvous.listener import Keep, Listener, listening_socket, refusals
from elasticjob_rendezvous.tcpstore.memory import ENTRY_BYTES, Memory, Outdated
from elasticjob_rendezvous.tcpstore.wire import (
    I64,
    MAGIC,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_KEYS_BYTES,
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
)

log = logging.getLogger(__name__)

BACKLOG = 2048
START_SECONDS = 10.0
CLOSE_SECONDS = 5.0
HELLO_SECONDS = 10.0
"""Maximum wait for the first message of a new connection."""
REQUEST_SECONDS = 60.0
"""Maximum duration of a request from its first byte to its answer's last, also of a busy store."""
IDLE_PROBE_SECONDS = 60
"""Idle time after which the kernel asks if a client still exists; clients wait for hours."""
CAPS = Caps(unproven=1024, per_address=512, kept=40_960, kept_per_address=4096)
"""A node holds two connections: 32,768 in the largest job, and some while nodes are replaced. A
local run has all of its nodes at one address."""
MAX_STORE_BYTES = 32 * 1024 * 1024
"""The state of 16,384 nodes in a rendezvous of torch's takes about 4 MiB.

The keys of one round take about 800 bytes for each node.
"""
MAX_TRANSIT_BYTES = 16 * 1024 * 1024
BUFFER_BYTES = 4096
"""Size of a connection's buffers, and of the parts of messages that the budget leaves out."""
GROWTH_BYTES = 64 * 1024
"""Expected growth of a value from one compare-and-set to the next."""
KEY_BYTES = ENTRY_BYTES + 128
"""Expected memory of a key in a list."""
FEW_KEYS = BUFFER_BYTES // KEY_BYTES


class TCPStoreServer:
    """Server that listens from its creation until `close`, or until it is garbage collected.

    Args:
        host: listen address; "" means all addresses of this machine.
        port: listen port; 0 selects a free one, see `port`.
        outdated: selects the keys to delete once the store is full; see `Memory`.

    Raises:
        OSError: the port is in use, or the address is not local.
    """

    def __init__(self, host: str = "", port: int = 0, outdated: Outdated = lambda keys: ()) -> None:
        self._serving = _Serving(host, port, outdated)
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

    def __init__(self, host: str, port: int, outdated: Outdated) -> None:
        self._socket = listening_socket(host, port, BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._pid = os.getpid()
        self._memory = Memory(MAX_STORE_BYTES, outdated)
        self._budget = Budget(MAX_TRANSIT_BYTES)
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
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
        listener = Listener(self._socket, CAPS, self._client, BUFFER_BYTES)
        serving.set()
        await self._stop.wait()
        for writer in tuple(self._clients):
            writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS / 2):
                await listener.close()

    async def _client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_PROBE_SECONDS)
        writer.transport.set_write_buffer_limits(BUFFER_BYTES)
        self._clients.add(writer)
        self._empty.clear()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await _validated(reader)
            if not keep():
                raise Malformed("too many clients, in all or of this address")
            while True:
                query = Query(await _number(reader, U8))
                async with asyncio.timeout(REQUEST_SECONDS):
                    with self._budget.hold() as hold:
                        await self._answer(query, _Parts(reader, hold), writer, hold)
                        await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # a disconnect, the normal end of a client
        except (ValueError, TimeoutError) as error:
            refusals.refused(log, writer.get_extra_info("peername"), repr(error))
        finally:
            self._clients.discard(writer)
            if not self._clients:
                self._empty.set()
            self._memory.forget(writer)
            writer.transport.abort()

    async def _answer(
        self, kind: Query, parts: _Parts, writer: asyncio.StreamWriter, hold: Hold
    ) -> None:
        memory = self._memory
        match kind:
            case Query.PING:
                writer.write(await parts.raw(U32.size))
            case Query.SET | Query.APPEND:
                key, value = await parts.key(), await parts.value()
                change = memory.set if kind is Query.SET else memory.append
                _wake(change(key, value))
            case Query.COMPARE_SET:
                compared = await parts.key(), await parts.value(twice=True), await parts.value()
                found, woken = memory.compare_set(*compared)
                del compared
                _wake(woken)
                await _send(writer, hold, [found])
            case Query.GET:
                await _send(writer, hold, [memory.get(await parts.key())])
            case Query.ADD:
                key, amount = await parts.key(), await parts.number(I64)
                total, woken = memory.add(key, amount)
                writer.write(I64.pack(total))
                _wake(woken)
            case Query.CHECK:
                here = memory.holds(await parts.keys())
                writer.write(U8.pack(READY if here else NOT_READY))
            case Query.WAIT:
                if memory.wait(writer, await parts.keys()):
                    writer.write(U8.pack(STOP_WAITING))
            case Query.CANCEL_WAIT:
                memory.forget(writer)
                writer.write(U8.pack(WAIT_CANCELED))
            case Query.NUM_KEYS:
                writer.write(I64.pack(len(memory)))
            case Query.DELETE_KEY:
                writer.write(I64.pack(memory.delete(await parts.key())))
            case Query.MULTI_GET:
                await _send(writer, hold, [memory.get(key) for key in await parts.keys()])
            case Query.MULTI_SET:
                for _ in range(await parts.count(MAX_KEYS)):
                    key, value = await parts.key(), await parts.value()
                    _wake(memory.set(key, value))
                    hold.release()
            case Query.LIST_KEYS:
                keys = memory.keys()
                writer.write(U64.pack(len(keys)))
                await _send(writer, hold, keys)
            case Query.VALIDATE:
                raise Malformed("validated twice")


async def _send(writer: asyncio.StreamWriter, hold: Hold, blocks: Sequence[bytes]) -> None:
    """Write blocks, each with its length; wait for the client to take more than a buffer's size.

    The request's own parts are no longer needed: requests that hold a share while they wait for
    more could wait for each other.
    """
    for data in blocks:
        hold.release()
        if len(data) > BUFFER_BYTES:
            await hold.grow(len(data))
        writer.write(block(data))
        await writer.drain()


def _wake(woken: Iterable[Hashable]) -> None:
    for writer in woken:
        assert isinstance(writer, asyncio.StreamWriter)
        writer.write(U8.pack(STOP_WAITING))


async def _validated(reader: asyncio.StreamReader) -> None:
    if await _number(reader, U8) != Query.VALIDATE or await _number(reader, U32) != MAGIC:
        raise Malformed("not the TCPStore protocol")


async def _number(reader: asyncio.StreamReader, form: struct.Struct) -> int:
    return int(form.unpack(await reader.readexactly(form.size))[0])


class _Parts:
    """Parts of one request, whose memory `hold` accounts for before they are read."""

    def __init__(self, reader: asyncio.StreamReader, hold: Hold) -> None:
        self._reader = reader
        self._hold = hold

    async def raw(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def number(self, form: struct.Struct) -> int:
        return await _number(self._reader, form)

    async def count(self, most: int) -> int:
        count = await self.number(U64)
        if count > most:
            raise Malformed(f"{count} is more than {most}")
        return count

    async def key(self) -> bytes:
        return await self.raw(await self.count(MAX_KEY_BYTES))

    async def value(self, *, twice: bool = False) -> bytes:
        """Read a value; `twice` takes room for a second one of about the same size."""
        size = await self.count(MAX_VALUE_BYTES)
        if size > BUFFER_BYTES:
            await self._hold.grow(size, ahead=size + GROWTH_BYTES if twice else 0)
        return await self.raw(size)

    async def keys(self) -> list[bytes]:
        count, size, found = await self.count(MAX_KEYS), 0, []
        if count > FEW_KEYS:
            await self._hold.grow(0, ahead=count * KEY_BYTES)
        for _ in range(count):
            found.append(await self.key())
            more = len(found[-1]) + ENTRY_BYTES
            size += more
            if size > MAX_KEYS_BYTES:
                raise Malformed(f"a list of keys takes more than {MAX_KEYS_BYTES} bytes")
            if size > BUFFER_BYTES:
                await self._hold.grow(more)
        return found


class Budget:
    """Budget of `max_bytes` for the messages that all connections read or send.

    A larger request waits until it is alone.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._freed = asyncio.Event()

    @contextlib.contextmanager
    def hold(self) -> Iterator[Hold]:
        """Return the share of one request, which ends with the block."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            hold.release()

    async def take(self, own: int, size: int) -> None:
        """Wait for room for `size` bytes beside the `own` that the same request holds."""
        while self._used > own and self._used + size > self._max_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._used += size

    def give(self, size: int) -> None:
        self._used -= size
        self._freed.set()


class Hold:
    """Share of one request in a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0
        self._needed = 0

    async def grow(self, size: int, ahead: int = 0) -> None:
        """Wait for room for `size` bytes more, and for `ahead` bytes that later calls then use."""
        wanted = self._needed + size + ahead
        if wanted > self._size:
            await self._budget.take(self._size, wanted - self._size)
            self._size = wanted
        self._needed += size

    def release(self) -> None:
        """Give back the whole share."""
        self._needed = 0
        if self._size:
            self._budget.give(self._size)
            self._size = 0
