"""A listening socket in the loop. Where no connection can be taken, it waits a little.

Who wants to connect goes on waiting, and would have the loop turn at once and for ever.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from .loop import Loop, Timer

AGAIN_SECONDS = 0.5
SAID_FOR_SECONDS = 60.0


class Listener:
    """`on_accepted` gets each connection; `say` hears, once in a while, why there are none."""

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
            return  # who came has gone again
        except OSError as error:  # such as: too many open files
            self._loop.unwatch(self._sock.fileno())
            self._again = self._loop.call_later(AGAIN_SECONDS, self._listen)
            self._told(error)
            return
        self._on_accepted(sock)

    def _told(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._said_at > SAID_FOR_SECONDS:
            self._say(f"no connection can be taken: {error.strerror}; those that come wait")
        self._said_at = now
