"""Sockets in the event loop: JSON-lines connections, listeners, and the server for agents.

Nothing here blocks the loop. One agent is attached at a time. A newer one takes over from an
older one: a killed agent returns as a new process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.settings import SOCKET, SettingsError
from elasticjob_launcher.wire import MAX_MESSAGE_BYTES, Lines, WireError, encode


class Connection:
    """Connection that calls `on_message` for each message and `on_closed` once at its end.

    A peer that no longer reads may have sent a last message, such as `release`, before it closed
    the connection: that is still received.
    """

    def __init__(self, loop: Loop, sock: socket.socket, limit_bytes: int) -> None:
        self._loop = loop
        self._sock = sock
        self._lines = Lines(limit_bytes)
        self._unsent = bytearray()
        self._closing = self._broken = False
        self.closed = False
        self.on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_closed: Callable[[], None] = lambda: None
        sock.setblocking(False)
        loop.watch(sock.fileno(), self._readable)

    def send(self, message: dict[str, Any]) -> None:
        if self.closed or self._closing or self._broken:
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
                    self._unsent.clear()
                    self._broken = True
        if self._closing and not self._unsent:
            self.close()
            return
        self._loop.watch(self._sock.fileno(), self._readable, self._write if self._unsent else None)


RETRY_SECONDS = 0.5
LOG_INTERVAL_SECONDS = 60.0


class Listener:
    """Listener that calls `on_accepted` for each connection; failures are logged, rate-limited."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_accepted: Callable[[socket.socket], object],
        write_line: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_accepted = on_accepted
        self._write_line = write_line
        self._reported_at = float("-inf")
        self._again: Timer | None = None
        self._paused = False
        self._listen()

    def pause(self) -> None:
        """Accept nothing until `resume`; the kernel queues new connections."""
        self._paused = True
        self._loop.unwatch(self._sock.fileno())

    def resume(self) -> None:
        """End a pause; do nothing without one."""
        if self._paused:
            self._paused = False
            self._listen()

    def close(self) -> None:
        self._paused = False
        if self._again is not None:
            self._again.cancel()
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()

    def _listen(self) -> None:
        if not self._paused:
            self._loop.watch(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the peer has disconnected
        except OSError as error:  # such as too many open files
            self._loop.unwatch(self._sock.fileno())
            self._again = self._loop.call_later(RETRY_SECONDS, self._listen)
            self._report_error(error)
            return
        self._on_accepted(sock)

    def _report_error(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._reported_at > LOG_INTERVAL_SECONDS:
            self._write_line(f"cannot accept connections, new ones must wait: {error.strerror}")
        self._reported_at = now


class AgentServer:
    """Server at `path`; `on_connected` receives each connection before it is read."""

    def __init__(
        self,
        loop: Loop,
        path: str,
        on_connected: Callable[[Connection], None],
        write_line: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._path = path
        self._on_connected = on_connected
        self._listener = Listener(loop, listening_socket(path), self._accepted, write_line)

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
        _remove_dead_socket(path)
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


def _remove_dead_socket(path: str) -> None:
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
