"""Reservation of ports for MASTER_PORT.

A bound socket that does not listen reserves each port: with SO_REUSEADDR, rank 0's store can bind
to the same port, and until then connections are refused.
"""

from __future__ import annotations

import errno
import socket

_ATTEMPTS = 20


class PortHolder:
    """Holder of the ports of the current and the next round.

    A port is held from before its round is sealed until the next round gets its own. Holding it
    costs nothing while rank 0 listens there, and no other process can take it after rank 0 fails.
    """

    def __init__(self, address: str) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held: list[socket.socket] = []

    def hold(self) -> int:
        """Reserve another port and return it; release all earlier ones except the last."""
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
        """Return a socket bound on all addresses of this machine, as the store listens on all."""
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
