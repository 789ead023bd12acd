"""Proxy before a real API server that drops or delays selected answers."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import wait_until
from tests.integration.faulty_servers import connected, serving

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_START_SECONDS = 10.0

Match = Callable[[str, bytes], bool]
"""Predicate on a request's first line and body, which selects the answer to lose."""


@dataclass
class CuttingProxy:
    """Forwarding proxy. `lost` counts dropped or delayed answers to executed requests."""

    server: ApiServer
    match: Match | None = None
    lost: int = 0
    url: str = ""
    _held: asyncio.Event | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(self._serve(),))
        thread.start()
        try:
            wait_until(lambda: bool(self.url), "the proxy", _START_SECONDS)
            yield self
        finally:
            loop.call_soon_threadsafe(self._done.set)
            thread.join()
            loop.close()

    def lose(self, match: Match) -> None:
        """Drop the answer to the next matching request."""
        self.match = match

    @contextmanager
    def hold(self, match: Match) -> Iterator[None]:
        """Delay the answer to the next matching request until the end of the block."""
        self._held = asyncio.Event()
        self.match = match
        try:
            yield
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._held.set)

    async def _serve(self) -> None:
        own = self.server.certificates.server
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(own.cert_file, own.key_file)
        async with serving(self._connection, tls) as address:
            self.url = f"https://{address}"
            await self._done.wait()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = ssl.create_default_context(cafile=self.server.certificates.ca_file)
        port = self.server.ports.numbers[0]
        async with connected(port, tls) as (answers, requests):
            passing = asyncio.create_task(_pass_on(answers, writer))
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = _LENGTH.search(head)
                    body = await reader.readexactly(int(length[1])) if length else b""
                    line = head.partition(b"\r\n")[0].decode()
                    if self.match is not None and self.match(line, body):
                        self.match = None
                        passing.cancel()
                        await asyncio.gather(passing, return_exceptions=True)
                        requests.write(head + body)
                        begin = await answers.readuntil(b"\r\n")  # the request was executed
                        self.lost += 1
                        if self._held is None:
                            return
                        await self._held.wait()
                        writer.write(begin)
                        passing = asyncio.create_task(_pass_on(answers, writer))
                        continue
                    requests.write(head + body)
                    await requests.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # one of the two has gone
            finally:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
