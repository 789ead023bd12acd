"""What agents say to each other over TCP: JSON lines, signed with the job's key.

A prober sends `{"nonce": n, "round": 7, "hmac"}` and gets one signed line; launchers answer
probes in the same form. The signed round number is the newest one that the prober knows: a
launcher without an agent ends the workers of an older one. A member that links adds its
name, proves the key in a second line, and then both sides send heartbeats:

    member       {"nonce": n, "link": {"member", "session"}}
    coordinator  {"member", "session", "nonce": m, "hmac"}        signed over n
    member       {"hmac"}                                         signed over m
    coordinator  {"count": 4, "heard": 3, "round": 7}    when that changes, and every half second
    member       {"count": 4, "heard": 4}                every half second

A launcher's and an agent's answer says in `"live_seconds"` how long the workers may live without a
new permission. A prober that can give one says `"extends": true`, gets a nonce, and sends a second
line: {"round": 7, "live_seconds": s, "hmac"}, signed over that nonce. Its seconds count from the
launcher's answer, so a line that is late or sent again permits nothing more.

`"vouched_seconds"` in a coordinator's line is how long its own evidence lasts, from when it heard
the line that it names: the other side knows no better when this one was spoken.

Each side counts its lines from 1, and says the count of the newest one that it has heard of the
other (0: what linked it). So whoever reads that knows since when it surely was heard itself.
Both say in `"leaving": {<member's id>: [<its agent>, "why"]}` who leaves, as long as they know of
any. An agent's name is the one that begins the names of its sessions.
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

from elasticjob_rendezvous.core.records import Farewell

HEARTBEAT_SECONDS = 0.5
QUIET_SECONDS = 1.5
SILENCE_SECONDS = 3.0
LAST_LOOK_SECONDS = 0.05
"""Who stood still itself reads what came meanwhile before silence counts."""
HANDSHAKE_SECONDS = 2.0
MAX_LINE_BYTES = 4096
MAX_LEAVING_BYTES = 3072
MAX_SECONDS = 86400.0
MAX_REASON_CHARACTERS = 100
REMEMBERED_LINES = 64
"""More than are under way: a link that is not heard for six of them is given up."""

Message = dict[str, Any]
Leaving = tuple[Farewell, ...]


class BadPeer(Exception):
    """The other side does not speak this protocol or does not hold the job's key."""


def seconds(value: float) -> float:
    """Seconds as they are sent: rounded down, within what is worth telling."""
    return math.floor(min(max(value, 0.0), MAX_SECONDS) * 1000) / 1000


def told_seconds(message: Message, name: str) -> float | None:
    """Seconds that a message tells; None where it does not."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= MAX_SECONDS else None


def nonce() -> str:
    return secrets.token_hex(16)


def run_key(prefix: str, user: str | None, password: str | None) -> bytes:
    """The job's key where no operator hands one out: members know the run and etcd's password."""
    return hashlib.sha256(f"{prefix}\n{user}\n{password}".encode()).digest()


def sign(job_key: bytes, question: str, body: Message) -> str:
    """Hex HMAC-SHA256 over the question's nonce and the body without its "hmac"."""
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
    """What a heartbeat says of who leaves: as many as its line has room for."""
    told: Message = {}
    for farewell in leaving:
        said = [farewell.agent, farewell.reason[:MAX_REASON_CHARACTERS]]
        more = {**told, farewell.id: said}
        if len(line(more)) > MAX_LEAVING_BYTES:
            break
        told = more
    return {"leaving": told} if told else {}


def leaving_told(message: Message) -> Leaving:
    """Who leaves, by the other side's heartbeat."""
    told = message.get("leaving")
    if not isinstance(told, dict):
        return ()
    found = []
    for id, said in told.items():
        match said:
            case [str(agent), str(reason)]:
                found.append(Farewell(id, agent, reason))
    return tuple(found)


class Count:
    """One side's count of its lines: when each was sent, and what the other has heard."""

    def __init__(self, linked_at: float) -> None:
        self.linked_at = linked_at
        self.heard_at = linked_at
        """Time at which the peer's newest line was heard."""
        self._proven = linked_at
        self._unheard: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_LINES)
        self._number = 0
        self._heard = 0

    def line(self, now: float) -> Message:
        """What the next line of ours says of it."""
        self._number += 1
        self._unheard.append((self._number, now))
        return {"count": self._number, "heard": self._heard}

    def proven(self, message: Message, now: float | None = None) -> float | None:
        """Return when we sent the line that the peer had heard last when it sent `message`.

        `now` is when that came. None where it does not say.
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
    """One message; raises `BadPeer`, `EOFError` at the end, or `TimeoutError`."""
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
