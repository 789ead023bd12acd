"""Wire protocol between agents over TCP: JSON lines, signed with the job's key.

A prober sends `{"nonce": n, "round": 7, "hmac"}` and receives one signed line; launchers answer
probes in the same form. The signed round number is the newest one known to the prober: a
launcher without an agent ends the workers of an older round. A member that opens a link adds its
name and proves possession of the key in a second line; then both sides send heartbeats:

    member       {"nonce": n, "link": {"member", "session"}}
    coordinator  {"member", "session", "nonce": m, "hmac"}        signed over n
    member       {"hmac"}                                         signed over m
    coordinator  {"count": 4, "heard": 3, "round": 7}    when that changes, and every half second
    member       {"count": 4, "heard": 4}                every half second

`"live_seconds"` in the answer of a launcher or an agent is the time that the workers may run
without an extension. A prober that can grant one sends `"extends": true`, receives a nonce, and
sends a second line: {"round": 7, "live_seconds": s, "hmac"}, signed over that nonce. Its seconds
count from the launcher's answer, so a late or replayed line extends nothing.

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
from collections import deque
from typing import Any

from elasticjob_rendezvous.protocol.records.members import LeaveNotice
from elasticjob_rendezvous.protocol.text import one_line

HEARTBEAT_SECONDS = 0.5
QUIET_SECONDS = 1.5
SILENCE_SECONDS = 3.0
LAST_LOOK_SECONDS = 0.05
"""Last read before a timeout: a process that was suspended first reads the pending lines."""
HANDSHAKE_SECONDS = 2.0
MAX_LINE_BYTES = 4096
MAX_LEAVING_BYTES = 3072
MAX_SECONDS = 86400.0
MAX_REASON_CHARACTERS = 100
REMEMBERED_LINES = 64
"""Maximum number of unacknowledged lines kept; a link is dropped after a silence of six lines."""

Message = dict[str, Any]
Leaving = tuple[LeaveNotice, ...]


class BadPeer(Exception):
    """Peer that violates this protocol or does not hold the job's key."""


def seconds(value: float) -> float:
    """Return seconds for sending: rounded down to ms, between 0 and MAX_SECONDS."""
    return math.floor(min(max(value, 0.0), MAX_SECONDS) * 1000) / 1000


def told_seconds(message: Message, name: str) -> float | None:
    """Return the seconds in a field of a message; None if missing or invalid."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= MAX_SECONDS else None


def nonce() -> str:
    return secrets.token_hex(16)


def run_key(prefix: str, user: str | None, password: str) -> bytes:
    """Derive the key of a run from its etcd password, for runs without a key from an operator."""
    return hashlib.sha256(f"{prefix}\n{user}\n{password}".encode()).digest()


def sign(job_key: bytes, question: str, body: Message) -> str:
    """Return the hex HMAC-SHA256 of the request's nonce and the body without its "hmac"."""
    unsigned = {name: value for name, value in body.items() if name != "hmac"}
    canonical = json.dumps(unsigned, sort_keys=True, separators=(",", ":"))
    return hmac.new(job_key, question.encode() + canonical.encode(), hashlib.sha256).hexdigest()


def verified(job_key: bytes, question: str, body: Message) -> bool:
    given = body.get("hmac")
    if not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, sign(job_key, question, body))


def line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def leaving_line(leaving: Leaving) -> Message:
    """Encode leave notices for a heartbeat: as many as fit into its line."""
    told: Message = {}
    for notice in leaving:
        said = [notice.agent, notice.reason[:MAX_REASON_CHARACTERS]]
        more = {**told, notice.id: said}
        if len(line(more)) > MAX_LEAVING_BYTES:
            break
        told = more
    return {"leaving": told} if told else {}


def leaving_told(message: Message) -> Leaving:
    """Decode the leave notices of a heartbeat."""
    told = message.get("leaving")
    if not isinstance(told, dict):
        return ()
    found = []
    for id, said in told.items():
        match said:
            case [str(agent), str(reason)]:
                found.append(LeaveNotice(*map(one_line, (id, agent, reason))))
    return tuple(found)


class Count:
    """Line counter of one side of a link: send times, and the peer's acknowledgements."""

    def __init__(self, linked_at: float) -> None:
        self.linked_at = linked_at
        self.heard_at = linked_at
        """Receipt time of the peer's newest line."""
        self._proven = linked_at
        self._unheard: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_LINES)
        self._number = 0
        self._heard = 0

    def line(self, now: float) -> Message:
        """Return the counter fields of our next line, sent at `now`."""
        self._number += 1
        self._unheard.append((self._number, now))
        return {"count": self._number, "heard": self._heard}

    def proven(self, message: Message, now: float | None = None) -> float | None:
        """Return the send time of our newest line that `message` acknowledges.

        `now` is the receipt time of `message`. None if it acknowledges nothing.
        """
        count, heard = message.get("count"), message.get("heard")
        if isinstance(count, int):
            self._heard = count
            self.heard_at = self.heard_at if now is None else now
        if not isinstance(heard, int):
            return None
        while self._unheard and self._unheard[0][0] <= heard:
            self._proven = self._unheard.popleft()[1]
        return self._proven


async def read(reader: asyncio.StreamReader, seconds: float) -> Message:
    """Read one message. Raises `BadPeer`, `EOFError` at the end, or `TimeoutError`."""
    async with asyncio.timeout(seconds):
        try:
            raw = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise EOFError("the peer closed the connection") from error
        except asyncio.LimitOverrunError as error:
            raise BadPeer("a line is too long") from error
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadPeer(f"not JSON: {raw[:40]!r}") from error
    if not isinstance(message, dict):
        raise BadPeer(f"not an object: {raw[:40]!r}")
    return message
