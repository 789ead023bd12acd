"""Unix socket server of the launcher, open to any agent.

One agent is attached at a time. A newer one takes over from an older one: a killed agent returns
as a new process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from .connection import Connection
from .listening import Listener
from .loop import Loop
from .settings import SOCKET, SettingsError
from .wire import MAX_MESSAGE_BYTES


class AgentServer:
    """Server at `path`; `on_connected` receives each connection before it is read."""

    def __init__(
        self,
        loop: Loop,
        path: str,
        on_connected: Callable[[Connection], None],
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._path = path
        self._on_connected = on_connected
        self._listener = Listener(loop, listening_socket(path), self._accepted, say)

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            Path(self._path).unlink()

    def _accepted(self, sock: socket.socket) -> None:
        self._on_connected(Connection(self._loop, sock, MAX_MESSAGE_BYTES))


def listening_socket(path: str) -> socket.socket:
    """Return a unix socket open to every uid; replace one left behind by a dead launcher."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        sock.bind(path)
        # The agent's container may run as a different user than the trainer's.
        Path(path).chmod(0o666)
        sock.listen(16)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(
            f"cannot listen at {SOCKET}={path}: {reason}; its directory must exist and be "
            "writable for this user"
        ) from error
    except SettingsError:
        sock.close()
        raise
    return sock


def _remove_dead(path: str) -> None:
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise SettingsError(f"another launcher listens at {SOCKET}={path}: set another path")
