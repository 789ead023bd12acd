"""Connection of the plug-in to the launcher of its pod: JSON lines over a unix socket."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

POLL_SECONDS = 0.5
CONNECT_SECONDS = 10.0


class LinkLost(Exception):
    """Connection that the launcher closed, or launcher that cannot be reached."""


class LinkRefused(Exception):
    """Request that the launcher refused; the message names the reason."""


class Link:
    """Connection that keeps the latest round and stop order; all methods are thread-safe."""

    def __init__(self, address: str) -> None:
        token, _, path = address.partition("@")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_SECONDS)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise LinkLost(f"cannot reach the launcher of this pod at {path}: {error}") from error
        self._socket.settimeout(None)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._round: dict[str, Any] | None = None
        self._stop = 0
        self._refused = ""
        self._lost = False
        self.send(type="hello", token=token)
        threading.Thread(target=self._read, name="elasticjob-link", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message; a lost connection is noticed by the reader."""
        line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            with self._changed:
                self._lost = True
                self._changed.notify_all()

    def forget_round(self) -> None:
        """Discard a round and a refusal that precede the next request to join."""
        with self._changed:
            self._round, self._refused = None, ""

    def next_round(self) -> dict[str, Any]:
        """Wait for the next round. Raises LinkLost or LinkRefused."""
        with self._changed:
            while True:
                if self._refused:
                    raise LinkRefused(self._refused)
                if self._round is not None:
                    return self._round
                if self._lost:
                    raise LinkLost("the launcher of this pod closed the connection")
                # With a timeout: a wait without one would delay the handling of signals.
                self._changed.wait(POLL_SECONDS)

    def stops(self, number: int) -> bool:
        """Return True if the workers of this round are to stop."""
        return self._stop >= number

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with self._socket, self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    self._handle_message(json.loads(line))
            except (OSError, ValueError):
                pass
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _handle_message(self, message: dict[str, Any]) -> None:
        with self._changed:
            if message["type"] == "round":
                self._round = message
            elif message["type"] == "stop":
                self._stop = max(self._stop, int(message["round"]))
            elif message["type"] in ("refused", "error"):
                self._refused = str(message["message"])
            self._changed.notify_all()
