"""Probe server: reports to other nodes if this member's workers and agent are alive.

A prober sends one JSON line, {"nonce": hex}, and receives one line, signed with the job's key so
that no other process at this address can answer for the member. A signed "round" beside the nonce
announces the newest round known to the prober: a launcher without an agent then stops older
workers.

A coordinator that keeps the lease of a member without an agent sends "extends": true, receives a
nonce of the launcher in the answer, and sends a second line, {"round", "live_seconds", "hmac"},
signed over that nonce. A permission therefore counts from the launcher's answer, and only once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from elasticjob_launcher.loop import Loop
from elasticjob_launcher.settings import PROBE_ADDRESS, PROBE_PORT, SettingsError
from elasticjob_launcher.sockets import Connection, Listener
from elasticjob_launcher.wire import canonical

NONCE = re.compile(r"(?:[0-9a-f]{2}){8,64}")
MAX_QUESTION_BYTES = 1024
QUESTION_SECONDS = 2.0
MAX_PROBERS = 128
MAX_PROBERS_OF_ADDRESS = 32
FEW = 2
"""Maximum connections of one address that are never closed in favour of others."""
BACKLOG = 1024
"""Connections that the kernel queues: all members may probe their lost coordinator at once."""


def signature(job_key: bytes, nonce: str, body: dict[str, Any]) -> str:
    """Return the hex HMAC-SHA256 over the nonce as sent and the canonical JSON of `body`.

    The field "hmac" of `body` is left out.
    """
    unsigned = {name: value for name, value in body.items() if name != "hmac"}
    return hmac.new(job_key, nonce.encode() + canonical(unsigned), hashlib.sha256).hexdigest()


def newer_round(question: dict[str, Any], job_key: bytes) -> int:
    """Return the newest round number that a prober of this job knows; 0 if it sent none."""
    number, nonce, given = (question.get(name) for name in ("round", "nonce", "hmac"))
    if not isinstance(number, int) or isinstance(number, bool) or not job_key:
        return 0
    if not isinstance(nonce, str) or not isinstance(given, str) or not given.isascii():
        return 0
    signed = hmac.compare_digest(given, signature(job_key, nonce, {"round": number}))
    return number if signed else 0


def answer(question: dict[str, Any], job_key: bytes, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a prober: the signed body, or an error that names the expected form."""
    nonce = question.get("nonce")
    if not isinstance(nonce, str) or not NONCE.fullmatch(nonce):
        return {"error": "nonce must be 16 to 128 lowercase hex digits, an even number of them"}
    if not job_key:
        return {"error": "no agent has attached to this launcher yet"}
    return {**body, "hmac": signature(job_key, nonce, body)}


def permission(said: dict[str, Any], job_key: bytes, nonce: str) -> tuple[int, float] | None:
    """Return the permitted round and its seconds if `said` is signed over the nonce, or None."""
    number, seconds, given = (said.get(name) for name in ("round", "live_seconds", "hmac"))
    if not isinstance(number, int) or isinstance(number, bool) or not job_key:
        return None
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        return None
    if not isinstance(given, str) or not given.isascii():
        return None
    body = {"round": number, "live_seconds": seconds}
    signed = hmac.compare_digest(given, signature(job_key, nonce, body))
    return (number, float(seconds)) if signed else None


class ProbeServer:
    """Probe server on a TCP port; `port` is the bound one.

    `answer_to` receives a question and the nonce for the answer, empty if none is requested.
    `permitted` receives the prober's reply to that nonce, the nonce, and its time of issue.

    At a cap the oldest connection of the address with the most of them is closed. If no address
    has more than a few, accepting pauses instead.
    """

    def __init__(
        self,
        loop: Loop,
        address: str,
        port: int,
        answer_to: Callable[[dict[str, Any], str], dict[str, Any]],
        permitted: Callable[[dict[str, Any], str, float], object],
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._answer_to = answer_to
        self._permitted = permitted
        self._open: dict[str, list[Connection]] = {}
        listening = _listening_socket(address, port)
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(loop, listening, self._accepted, say)

    def close(self) -> None:
        self._listener.close()

    def _accepted(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # the prober has disconnected
            sock.close()
            return
        connection = Connection(self._loop, sock, MAX_QUESTION_BYTES)
        own = self._open.setdefault(address, [])
        own.append(connection)
        too_late = self._loop.call_later(QUESTION_SECONDS, connection.close)

        def on_message(question: dict[str, Any]) -> None:
            nonce = secrets.token_hex(16) if question.get("extends") is True else ""
            asked_at = time.monotonic()
            connection.send(self._answer_to(question, nonce))
            if not nonce:
                connection.close_when_sent()
                return

            def on_permission(said: dict[str, Any]) -> None:
                self._permitted(said, nonce, asked_at)
                connection.close_when_sent()

            connection.on_message = on_permission

        def on_closed() -> None:
            too_late.cancel()
            own.remove(connection)
            if not own:
                del self._open[address]
            self._listener.resume()

        connection.on_message = on_message
        connection.on_closed = on_closed
        self._make_room(own)

    def _make_room(self, own: list[Connection]) -> None:
        """Close a connection, or stop accepting, if a cap is reached."""
        busiest = max(self._open.values(), key=len)
        count = sum(map(len, self._open.values()))
        if len(own) > MAX_PROBERS_OF_ADDRESS:
            own[0].close()
        elif count > MAX_PROBERS and len(busiest) > FEW:
            busiest[0].close()
        elif count >= MAX_PROBERS and len(busiest) <= FEW:
            self._listener.pause()


def _listening_socket(address: str, port: int) -> socket.socket:
    try:
        if address:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            sock = _bound(family, address, port)
        else:
            sock = _bound_to_all(port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on port {port} of {address or 'any address'}: {error.strerror}; "
            f"set {PROBE_PORT} to a free port or 0, {PROBE_ADDRESS} to an address of this host"
        ) from error
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def _bound_to_all(port: int) -> socket.socket:
    """Return a socket for both address families if the host has IPv6, else for IPv4."""
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError:
        return _bound(socket.AF_INET, "0.0.0.0", port)


def _bound(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
