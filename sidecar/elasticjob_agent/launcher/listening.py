"""Listening socket in the event loop, with a delay after a failed accept.

A pending connection keeps the socket readable, so that the loop would otherwise spin.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from .loop import Loop, Timer

AGAIN_SECONDS = 0.5
SAID_FOR_SECONDS = 60.0


class Listener:
    """Listener that calls `on_accepted` for each connection; `say` logs failures, rate-limited."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_accepted: Callable[[socket.socket], object],
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_accepted = on_accepted
        self._say = say
        self._said_at = float("-inf")
        self._again: Timer | None = None
        self._listen()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()

    def _listen(self) -> None:
        self._loop.watch(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the peer has disconnected
        except OSError as error:  # such as too many open files
            self._loop.unwatch(self._sock.fileno())
            self._again = self._loop.call_later(AGAIN_SECONDS, self._listen)
            self._told(error)
            return
        self._on_accepted(sock)

    def _told(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._said_at > SAID_FOR_SECONDS:
            self._say(f"cannot accept connections, new ones must wait: {error.strerror}")
        self._said_at = now
