"""Probe server: reports to other nodes if this member's workers and agent are alive.

`proof` defines the messages. A prober first proves that it holds the job's key; only then does the
launcher act on its round number and answer. A stranger gets no information. The answer is
authenticated, so that no other process at this address can answer for the member.
The newest round known to the prober makes a launcher without an agent stop older workers.

A coordinator that keeps the lease of a member without an agent sends "extends": true, and a second
line with its permission. The permission is signed together with the answer, and the answer with a
nonce of the launcher: a permission is valid once, from the time of that answer.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from elasticjob_launcher.admission import Admission, Caps
from elasticjob_launcher.loop import Loop
from elasticjob_launcher.proof import (
    PROBE_LAUNCHER,
    BadPeer,
    Message,
    Peer,
    Question,
    Refusal,
    answering,
    challenge,
    probe_answer,
    reached_address,
    read_permission,
    read_question,
)
from elasticjob_launcher.settings import PROBE_ADDRESS, PROBE_PORT, SettingsError
from elasticjob_launcher.sockets import Connection, Listener

MAX_QUESTION_BYTES = 2048
QUESTION_SECONDS = 2.0
MAX_PROBERS = 128
CAPS = Caps(unproven=MAX_PROBERS, per_address=32, few=2)
BACKLOG = 1024
"""Connections that the kernel queues: all members may probe their lost coordinator at once."""


class ProbeServer:
    """Probe server on a TCP port; `port` is the bound one.

    `identity` returns this member and the job's key, which is empty before an agent has attached.
    `facts` receives a verified question and returns the fields of the answer. `permitted` receives
    round and seconds of a verified permission, and the time from which they count.
    """

    def __init__(
        self,
        loop: Loop,
        address: str,
        port: int,
        identity: Callable[[], tuple[Peer, bytes]],
        facts: Callable[[Question], Message],
        permitted: Callable[[int, float, float], object],
        write_line: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._identity = identity
        self._facts = facts
        self._permitted = permitted
        self._admission: Admission[Connection] = Admission(CAPS)
        listening = _listening_socket(address, port)
        self.port: int = listening.getsockname()[1]
        self._listener = Listener(loop, listening, self._accepted, write_line)

    def close(self) -> None:
        self._listener.close()

    def _accepted(self, sock: socket.socket) -> None:
        try:
            address = str(sock.getpeername()[0])
        except OSError:  # the prober has disconnected
            sock.close()
            return
        at = reached_address(sock.getsockname())
        connection = Connection(self._loop, sock, MAX_QUESTION_BYTES)
        crowded = self._admission.arrive(connection, address)
        too_late = self._loop.call_later(QUESTION_SECONDS, connection.close)
        nonce = secrets.token_hex(16)

        def on_message(message: Message) -> None:
            try:
                self._answer(connection, message, nonce, at)
            except BadPeer as error:
                _refuse(connection, error)

        def on_closed() -> None:
            too_late.cancel()
            self._admission.leave(connection)
            self._listener.resume()

        connection.on_message = on_message
        connection.on_closed = on_closed
        if crowded is not None:
            crowded.close()
        if self._admission.paused:
            self._listener.pause()
        connection.send(challenge(nonce))

    def _answer(self, connection: Connection, message: Message, nonce: str, at: str) -> None:
        """Answer a question; wait for a permission if the prober announced one."""
        me, job_key = self._identity()
        if not job_key:
            raise BadPeer(Refusal.NO_KEY, "no agent has attached to this launcher yet")
        question = read_question(job_key, message, nonce, (PROBE_LAUNCHER,))
        exchange = answering(question, me, nonce)
        facts = {"at": at, **self._facts(question)}
        answer = probe_answer(job_key, exchange, facts, question.mac)
        answered_at = time.monotonic()
        connection.send(answer)
        if not question.extends:
            connection.close_when_sent()
            return

        def on_permission(message: Message) -> None:
            try:
                number, seconds = read_permission(job_key, exchange, message, answer["mac"])
            except BadPeer as error:
                _refuse(connection, error)
                return
            self._permitted(number, seconds, answered_at)
            connection.close_when_sent()

        connection.on_message = on_permission


def _refuse(connection: Connection, error: BadPeer) -> None:
    connection.send({"error": str(error)})
    connection.close_when_sent()


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
