"""Servers that are not etcd, API servers with faults, and a proxy that drops etcd's answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve on a free port of 127.0.0.1 and yield its address; abort all connections at exit."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await handler(reader, writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            writer.close()  # also if the task was cancelled before its first step

        writers.append(writer)
        task = asyncio.create_task(one(reader, writer))
        tasks.add(task)
        task.add_done_callback(ended)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await abort(*writers)


@asynccontextmanager
async def connected(
    port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a port of 127.0.0.1; abort the connection at exit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield reader, writer
    finally:
        await abort(writer)


async def abort(*writers: asyncio.StreamWriter) -> None:
    """Abort connections and wait for their end.

    `close` alone leaves a socket open at the end of the event loop while unsent data or, with TLS,
    the peer's answer is missing. The garbage collector reports it, in any later test.
    """
    for writer in writers:
        # Before Python 3.11.4 a TLS transport that was closed twice cannot be aborted.
        with contextlib.suppress(AttributeError):
            writer.transport.abort()
    for writer in writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak another protocol."""
    writer.write(b"220 mail.example ESMTP ready to serve\r\n")
    while await reader.read(4096):
        writer.write(bytes(range(256)))


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Behave as an HTTP/1.1 server."""
    await reader.read(4096)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept connections and send nothing."""
    while await reader.read(4096):
        pass


_HALF_OF_AN_ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n"
    b'{"kind": "APIVersions", '
)


async def reset_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reset the connection in the middle of an HTTP answer."""
    await _half_answer(reader, writer)
    linger = struct.pack("ii", 1, 0)  # closing then sends RST
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def short_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the connection in the middle of an HTTP answer."""
    await _half_answer(reader, writer)


async def stalled_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send nothing more in the middle of an HTTP answer."""
    await _half_answer(reader, writer)
    await silence(reader, writer)


async def _half_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_HALF_OF_AN_ANSWER)
    await writer.drain()


@contextmanager
def serving_in_thread(handler: Handler) -> Iterator[str]:
    """Serve as `serving` does, in a thread of its own."""
    address: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving(handler) as found:
            address.append(found)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60), "the server does not start"
        yield address[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


class Proxy:
    """TCP proxy to a server on 127.0.0.1; use `handle` with `serving`.

    While `swallow` is set, the server's answers are lost and the connection stays.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow = False

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for writer in self._writers:
            writer.close()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self._port) as (upstream, downstream):
            both = {writer, downstream}
            self._writers |= both
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, downstream))
                    tasks.create_task(self._answer(upstream, writer))
            except* ConnectionError:
                pass
            finally:
                self._writers -= both

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.swallow:
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError
