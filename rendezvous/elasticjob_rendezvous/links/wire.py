"""Lines between agents over TCP: framing, seals, and the heartbeats of a link.

`elasticjob_launcher.proof` describes the first lines of every connection, by which both sides prove
that they hold the job's key. A probe ends with them. On a link both sides then send heartbeats,
sealed by `Channel`:

    coordinator  {"heard": 3, "round": 7}    when the round changes, and every half second
    member       {"heard": 4}                every half second

`"vouched_seconds"` in a coordinator's line is the remaining validity of its own evidence, counted
from its receipt of the line in `"heard"`: the member knows no better estimate of the time at which
the coordinator's line was sent.

Each side numbers its lines from 1, and sends the number of the newest line received from the
other side (0: the line that opened the link). The other side thus knows up to which time its
lines were certainly received. `"leaving": {<member's id>: [<its agent>, "why"]}` in a line of
either side contains the known leave notices. An agent's name is the prefix of its sessions' names.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import struct
from collections import deque
from dataclasses import dataclass

from elasticjob_launcher.proof import (
    MAX_SECONDS,
    BadPeer,
    Exchange,
    Message,
    Refusal,
    Role,
    check_fields,
    digest,
    read_seconds,
    read_whole,
)
from elasticjob_rendezvous.listener import ACCEPT_AGAIN_SECONDS
from elasticjob_rendezvous.protocol.records.members import LeaveNotice
from elasticjob_rendezvous.protocol.text import one_line

LAST_READ_SECONDS = 0.05
"""Last read before a timeout: a process that was suspended first reads the pending lines."""
MAX_LINE_BYTES = 4096
MAX_LEAVING_BYTES = 3072
MAX_REASON_CHARACTERS = 100
KEPT_LINES = 64
"""Maximum number of unacknowledged lines kept; a link is dropped after a silence of six lines."""

Leaving = tuple[LeaveNotice, ...]


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Times of links and probes.

    Args:
        heartbeat_seconds: interval of the lines that each side of a link sends.
        quiet_seconds: silence after which a link counts as quiet.
        silence_seconds: silence after which a link is closed.
        handshake_seconds: maximum wait for each line by which the sides prove themselves.
        first_redial_seconds: pause before the first reconnection of a link; later ones are longer.
        accept_again_seconds: pause of the server after a connection that it could not accept.
    """

    heartbeat_seconds: float = 0.5
    quiet_seconds: float = 1.5
    silence_seconds: float = 3.0
    handshake_seconds: float = 2.0
    first_redial_seconds: float = 0.2
    accept_again_seconds: float = ACCEPT_AGAIN_SECONDS


LINK_TIMES = LinkTimes()


def seconds(value: float) -> float:
    """Return seconds for sending: rounded down to ms, between 0 and MAX_SECONDS."""
    return math.floor(min(max(value, 0.0), MAX_SECONDS) * 1000) / 1000


def nonce() -> str:
    return secrets.token_hex(16)


def run_key(prefix: str, user: str | None, password: str) -> bytes:
    """Derive the key of a run from its etcd password, for runs without a key from an operator."""
    return hashlib.sha256(f"{prefix}\n{user}\n{password}".encode()).digest()


def line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def leaving_line(leaving: Leaving) -> Message:
    """Encode leave notices for a heartbeat: as many as fit into its line."""
    fitting: Message = {}
    for notice in leaving:
        stored = [notice.agent, notice.reason[:MAX_REASON_CHARACTERS]]
        more = {**fitting, notice.id: stored}
        if len(line(more)) > MAX_LEAVING_BYTES:
            break
        fitting = more
    return {"leaving": fitting} if fitting else {}


def read_leaving(message: Message) -> Leaving:
    """Decode the leave notices of a heartbeat. Raises `BadPeer`."""
    notices = message.get("leaving", {})
    if not isinstance(notices, dict):
        raise BadPeer(Refusal.MALFORMED, "leaving must be an object")
    found = []
    for id, notice in notices.items():
        match notice:
            case [str(agent), str(reason)]:
                found.append(LeaveNotice(*map(one_line, (id, agent, reason))))
            case _:
                raise BadPeer(Refusal.MALFORMED, "a leave notice must be an agent and a reason")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Line of an established link. A member sends neither `round` nor `vouched_seconds`."""

    acknowledged: int
    round: int = 0
    vouched_seconds: float | None = None
    leaving: Leaving = ()


def member_heartbeat(message: Message) -> Heartbeat:
    """Read a member's line. Raises `BadPeer`."""
    check_fields(message, ("heard",), ("leaving",))
    return Heartbeat(read_whole(message, "heard"), leaving=read_leaving(message))


def coordinator_heartbeat(message: Message) -> Heartbeat:
    """Read a coordinator's line. Raises `BadPeer`."""
    check_fields(message, ("heard", "round"), ("vouched_seconds", "leaving"))
    evidence_seconds = (
        read_seconds(message, "vouched_seconds") if "vouched_seconds" in message else None
    )
    acknowledged, number = read_whole(message, "heard"), read_whole(message, "round")
    return Heartbeat(acknowledged, number, evidence_seconds, read_leaving(message))


class Count:
    """Line counter of one side of a link: send times, and the peer's acknowledgements."""

    def __init__(self, linked_at: float) -> None:
        self.linked_at = linked_at
        self.received_at = linked_at
        """Receipt time of the peer's newest line."""
        self._proven = linked_at
        self._unconfirmed: deque[tuple[int, float]] = deque(maxlen=KEPT_LINES)
        self._number = 0
        self._received = 0

    def line(self, now: float) -> Message:
        """Return the counter field of our next line, sent at `now`."""
        self._number += 1
        self._unconfirmed.append((self._number, now))
        return {"heard": self._received}

    def proven(self, acknowledged: int, now: float) -> float:
        """Return the send time of our newest line that the peer's next line acknowledges.

        `now` is the receipt time of that line. Raises `BadPeer` for a line that was never sent.
        """
        if acknowledged > self._number:
            raise BadPeer(Refusal.MALFORMED, "it acknowledges a line that was never sent")
        self._received += 1
        self.received_at = now
        while self._unconfirmed and self._unconfirmed[0][0] <= acknowledged:
            self._proven = self._unconfirmed.popleft()[1]
        return self._proven


async def read_line(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Read one line. Raises `BadPeer`, `EOFError` at the end, or `TimeoutError`."""
    async with asyncio.timeout(seconds):
        try:
            return await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise EOFError("the peer closed the connection") from error
        except asyncio.LimitOverrunError as error:
            raise BadPeer(Refusal.MALFORMED, "a line is too long") from error


def decoded(raw: bytes) -> Message:
    """Return the message in a line. Raises `BadPeer`."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadPeer(Refusal.MALFORMED, f"not JSON: {raw[:40]!r}") from error
    if not isinstance(message, dict):
        raise BadPeer(Refusal.MALFORMED, f"not an object: {raw[:40]!r}")
    return message


async def read(reader: asyncio.StreamReader, seconds: float) -> Message:
    """Read one message. Raises `BadPeer`, `EOFError` at the end, or `TimeoutError`."""
    return decoded(await read_line(reader, seconds))


class Channel:
    """Keys and counters of one side of a link; `answer_mac` is the code that completed it. No I/O.

    The handshake gives each direction of each link a key of its own. A line is its JSON object, a
    space and the HMAC-SHA256 of the line's number and that object under the key of its direction.
    Numbers count from 1 and are not sent: a line that is lost, repeated, moved, changed, invented
    or sent back to its sender fails, and the receiver closes the link.
    """

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
        payload = line(message)[:-1]
        return payload + b" " + _code(self._sends, self._sent, payload) + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message in the next received line. Raises `BadPeer`."""
        payload, _, given = line.rstrip(b"\n").rpartition(b" ")
        if not hmac.compare_digest(_code(self._receives, self._received + 1, payload), given):
            raise BadPeer(Refusal.WRONG_LINE, f"line {self._received + 1} is not the peer's")
        self._received += 1
        return decoded(payload)


def _code(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + payload, "sha256").hex().encode()
