"""Authenticated lines of an established link, for either of its sides. No I/O.

The handshake gives each direction of each link a key of its own. A line is its JSON object, a space
and the HMAC-SHA256 of the line's number and that object under the key of its direction. Numbers
count from 1 and are not sent: a line that is lost, repeated, moved, changed, invented or sent back
to its sender fails, and the receiver closes the link.
"""

from __future__ import annotations

import hmac
import struct

from elasticjob_launcher.proof import BadPeer, Exchange, Message, Refusal, Role, digest
from elasticjob_rendezvous.links import wire


class Channel:
    """Keys and counters of one side of a link; `answer_mac` is the code that completed it."""

    def __init__(
        self, job_key: bytes, exchange: Exchange, answer_mac: str, coordinates: bool
    ) -> None:
        keys = [
            digest(job_key, role, exchange, b"", answer_mac)
            for role in (Role.MEMBER_LINES, Role.COORDINATOR_LINES)
        ]
        self._receives, self._sends = keys if coordinates else reversed(keys)
        self._sent = 0
        self._received = 0

    def seal(self, message: Message) -> bytes:
        """Return the next line to send."""
        self._sent += 1
        payload = wire.line(message)[:-1]
        return payload + b" " + _code(self._sends, self._sent, payload) + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message in the next received line. Raises `BadPeer`."""
        payload, _, given = line.rstrip(b"\n").rpartition(b" ")
        if not hmac.compare_digest(_code(self._receives, self._received + 1, payload), given):
            raise BadPeer(Refusal.WRONG_LINE, f"line {self._received + 1} is not the peer's")
        self._received += 1
        return wire.decoded(payload)


def _code(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + payload, "sha256").hex().encode()
