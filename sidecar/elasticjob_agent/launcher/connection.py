"""Stream connection for JSON lines that never blocks the event loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from .loop import Loop
from .wire import MAX_MESSAGE_BYTES, Lines, WireError, encode


class Connection:
    """Connection that calls `on_message` for each message and `on_closed` once at its end."""

    def __init__(self, loop: Loop, sock: socket.socket, limit_bytes: int) -> None:
        self._loop = loop
        self._sock = sock
        self._lines = Lines(limit_bytes)
        self._unsent = bytearray()
        self._closing = False
        self.closed = False
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_closed: Callable[[], None] = lambda: None
        sock.setblocking(False)
        loop.watch(sock.fileno(), self._readable)

    def send(self, message: dict[str, Any]) -> None:
        if self.closed or self._closing:
            return
        self._unsent += encode(message)
        self._write()
        if len(self._unsent) > MAX_MESSAGE_BYTES:
            self.close()  # a peer that does not read must not exhaust memory

    def close_when_sent(self) -> None:
        self._closing = True
        self._write()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        self.on_closed()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            messages = self._lines.feed(data)
            for message in messages:
                if not (self.closed or self._closing):
                    self.on_message(message)
        except WireError as error:
            self.send({"type": "error", "message": str(error)})
            self.close_when_sent()

    def _write(self) -> None:
        if self.closed:
            return
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    del self._unsent[: self._sock.send(self._unsent)]
                except BlockingIOError:
                    raise
                except OSError:
                    self.close()
                    return
        if self._closing and not self._unsent:
            self.close()
            return
        self._loop.watch(self._sock.fileno(), self._readable, self._write if self._unsent else None)
