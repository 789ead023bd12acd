"""Ports for MASTER_PORT, held so that nobody else gets them.

Each is held by a bound socket that does not listen: with SO_REUSEADDR, rank 0's
store binds over it, and until then a connection is refused.
"""

from __future__ import annotations

import errno
import socket

_ATTEMPTS = 20


class PortHolder:
    """Holds the port of the current round and that of the next.

    A port is held from before its round is sealed until the round after it
    gets its own: while rank 0 listens there, holding it costs nothing, and when
    rank 0 failed nobody slips in.
    """

    def __init__(self, address: str) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held: list[socket.socket] = []

    def hold(self) -> int:
        """Hold one more port and return it; let go of all but the last one."""
        fresh = self._bound()
        for old in self._held[:-1]:
            old.close()
        self._held = [*self._held[-1:], fresh]
        return int(fresh.getsockname()[1])

    def close(self) -> None:
        for held in self._held:
            held.close()
        self._held = []

    def _bound(self) -> socket.socket:
        """A socket on every address of this machine: the store listens on all of them."""
        for _ in range(_ATTEMPTS):
            held = socket.socket(self._family, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", 0))
            except OSError as error:
                held.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return held
        raise OSError(errno.EADDRINUSE, "no free port for MASTER_PORT on this machine")
