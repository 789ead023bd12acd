"""Reservation of the port on which rank 0 of the next round will listen."""

from __future__ import annotations

import socket


class HeldPort:
    """Port that is bound without listening, so that no other process can take it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def hold(self) -> int:
        """Return the reserved port; the same one until `release`."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("", 0))
        port: int = self._socket.getsockname()[1]
        return port

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
