"""What agents say to each other over TCP: JSON lines, signed with the job's key.

A prober sends `{"nonce": n, "round": 7, "hmac"}` and gets one signed line; launchers answer
probes in the same form. The signed round number is the newest one that the prober knows: a
launcher without an agent ends the workers of an older one. A member that links adds its
name, proves the key in a second line, and then both sides send heartbeats:

    member       {"nonce": n, "link": {"member", "session"}}
    coordinator  {"member", "session", "nonce": m, "hmac"}        signed over n
    member       {"hmac"}                                         signed over m
    coordinator  {"round": 7}        at once when it changes, and every half second
    member       {}                  every half second

Both say in `"leaving": {<member's id>: "why"}` who leaves, as long as they know of any.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

HEARTBEAT_SECONDS = 0.5
QUIET_SECONDS = 1.5
SILENCE_SECONDS = 3.0
LAST_LOOK_SECONDS = 0.05
"""Who stood still itself reads what came meanwhile before silence counts."""
HANDSHAKE_SECONDS = 2.0
MAX_LINE_BYTES = 4096
MAX_LEAVING_BYTES = 3072
MAX_REASON_CHARACTERS = 100

Message = dict[str, Any]
Leaving = tuple[tuple[str, str], ...]
"""Members that leave, and why: (id, reason) of each."""


class BadPeer(Exception):
    """The other side does not speak this protocol or does not hold the job's key."""


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
    for id, reason in leaving:
        more = {**told, id: reason[:MAX_REASON_CHARACTERS]}
        if len(line(more)) > MAX_LEAVING_BYTES:
            break
        told = more
    return {"leaving": told} if told else {}


def leaving_told(message: Message) -> Leaving:
    """Who leaves, by the other side's heartbeat."""
    told = message.get("leaving")
    if not isinstance(told, dict):
        return ()
    return tuple((id, reason) for id, reason in told.items() if isinstance(reason, str))


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
