"""Proofs that a peer holds the job's key, for links, probes and the agents' reports. No I/O.

The only construction of message authentication codes between the processes of a job: the agents,
the operator and the launcher all use it. Each code is an HMAC-SHA256 with the job's key over
length-prefixed fields: the protocol's label, the role of the message, the code of the previous
message of the exchange, member and session and nonce of the asker, the same of the answerer, and
the body. Each side adds a nonce of its own, and no two roles share an input, so a code that one
message carries is useless in every other.

An exchange of links and probes over TCP, one JSON object a line:

    answerer  {"nonce": m}
    asker     {"ask": "link", "nonce": n, "from": [member, session], "to": [member, session], "mac"}
    answerer  {"member", "session", "mac"}

    answerer  {"nonce": m}
    asker     {"ask": "probe launcher", "nonce", "from", "to", "round": 7, "extends": false, "mac"}
    answerer  {"member", "session", "at": "address port", "agent_attached", "workers", …, "mac"}
    asker     {"round": 7, "live_seconds": 2.5, "mac"}             with "extends": true

The answerer states nothing about itself before the asker has proven that it holds the key. Unknown
fields, missing fields and fields of another type are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
from enum import Enum
from typing import Any, Dict, NamedTuple

PROTOCOL = b"elasticjob peers 2"
MAX_SECONDS = 86400.0
MAX_NAME_CHARACTERS = 256
LINK = "link"
PROBE_LAUNCHER = "probe launcher"
PROBE_AGENT = "probe agent"
"""Questions: an agent proves less than its launcher, so neither answers for the other."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_MAC = re.compile(r"[0-9a-f]{64}")
_ADDRESS_CHARACTERS = 96
_LARGEST = 2**63

Message = Dict[str, Any]


class Role(Enum):
    """Role of a message, which no other message shares."""

    LINK_QUESTION = b"link question"
    LINK_ANSWER = b"link answer"
    MEMBER_LINES = b"link lines of the member"
    COORDINATOR_LINES = b"link lines of the coordinator"
    PROBE_QUESTION = b"probe question"
    PROBE_ANSWER = b"probe answer"
    PROBE_PERMISSION = b"probe permission"
    REPORT_QUESTION = b"report question"
    REPORT_ANSWER = b"report answer"


class Refusal(Enum):
    """Reason for which a peer is refused."""

    MALFORMED = "Malformed"
    UNKNOWN_FIELD = "UnknownField"
    WRONG_PROOF = "WrongProof"
    WRONG_LINE = "WrongLine"
    OTHER_MEMBER = "OtherMember"
    BAD_ADDRESS = "BadAddress"
    NO_KEY = "NoKey"
    TOO_MANY = "TooMany"


class BadPeer(Exception):
    """Peer that violates the protocol or does not hold the job's key."""

    def __init__(self, reason: Refusal, text: str) -> None:
        super().__init__(f"{reason.value}: {text}")
        self.reason = reason


class Peer(NamedTuple):
    """Identity of one side: a member and its session; both empty for the operator."""

    member: str
    session: str


class Exchange(NamedTuple):
    """Both sides of an exchange, and the nonce that each of them chose."""

    asker: Peer
    asker_nonce: str
    answerer: Peer
    answerer_nonce: str


class Question(NamedTuple):
    """Verified question. `target` is the member that the asker wants to reach."""

    ask: str
    asker: Peer
    target: Peer
    nonce: str
    round: int
    extends: bool
    mac: str


class Answer(NamedTuple):
    """Verified answer. `at` is the address at which the answerer was reached."""

    answerer: Peer
    at: str
    agent_attached: bool
    workers: int
    round: int | None
    live_seconds: float | None
    mac: str


def canonical(message: Message) -> bytes:
    """Return the canonical form of a message: sorted keys, no spaces, ASCII."""
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode("ascii")


def digest(job_key: bytes, role: Role, exchange: Exchange, body: bytes, previous: str) -> bytes:
    """Return the code of one message; `previous` is that of the message before it, or empty."""
    if not job_key:
        raise ValueError("a proof requires a job key")
    names = (*exchange.asker, exchange.asker_nonce, *exchange.answerer, exchange.answerer_nonce)
    fields = (PROTOCOL, role.value, previous.encode(), *(_utf8(name) for name in names), body)
    joined = b"".join(struct.pack(">I", len(field)) + field for field in fields)
    return hmac.new(job_key, joined, hashlib.sha256).digest()


def signed(
    job_key: bytes, role: Role, exchange: Exchange, body: Message, previous: str = ""
) -> Message:
    """Return the message with its code as the field "mac"."""
    return {**body, "mac": digest(job_key, role, exchange, canonical(body), previous).hex()}


def verify(
    job_key: bytes, role: Role, exchange: Exchange, message: Message, previous: str = ""
) -> str:
    """Return the code of a message. Raises `BadPeer` unless the sender holds the job's key."""
    body = {name: value for name, value in message.items() if name != "mac"}
    given = message.get("mac")
    if not isinstance(given, str) or not _MAC.fullmatch(given):
        raise BadPeer(Refusal.MALFORMED, "mac must be 64 lowercase hex digits")
    if not job_key or not hmac.compare_digest(
        digest(job_key, role, exchange, canonical(body), previous).hex(), given
    ):
        raise BadPeer(Refusal.WRONG_PROOF, "the peer does not hold this job's key")
    return given


# -- challenge ----------------------------------------------------------------------


def challenge(nonce: str) -> Message:
    """Return the first line of every exchange."""
    return {"nonce": nonce}


def read_challenge(message: Message) -> str:
    """Return the nonce of a challenge. Raises `BadPeer`."""
    check_fields(message, ("nonce",))
    return read_nonce(message)


# -- question -----------------------------------------------------------------------


def link_question(job_key: bytes, exchange: Exchange) -> Message:
    """Return the question of a member that opens a link."""
    return signed(job_key, Role.LINK_QUESTION, exchange, _question(LINK, exchange))


def probe_question(
    job_key: bytes, exchange: Exchange, ask: str, round: int, extends: bool
) -> Message:
    """Return the question of a prober that knows of `round`, to a launcher or an agent."""
    body = {**_question(ask, exchange), "round": round, "extends": extends}
    return signed(job_key, Role.PROBE_QUESTION, exchange, body)


def _question(ask: str, exchange: Exchange) -> Message:
    return {
        "ask": ask,
        "nonce": exchange.asker_nonce,
        "from": list(exchange.asker),
        "to": list(exchange.answerer),
    }


def read_question(
    job_key: bytes, message: Message, answerer_nonce: str, answered: tuple[str, ...]
) -> Question:
    """Return a question that answers the challenge with `answerer_nonce`. Raises `BadPeer`.

    `answered` names the questions that this process answers.
    """
    ask = message.get("ask")
    if ask not in answered:
        raise BadPeer(Refusal.MALFORMED, f"ask must be one of: {', '.join(answered)}")
    shared = ("ask", "nonce", "from", "to", "mac")
    check_fields(message, shared if ask == LINK else (*shared, "round", "extends"))
    nonce, asker, target = read_nonce(message), _peer(message, "from"), _peer(message, "to")
    number, extends, role = 0, False, Role.LINK_QUESTION
    if ask != LINK:
        number, extends = read_whole(message, "round"), _flag(message, "extends")
        role = Role.PROBE_QUESTION
    exchange = Exchange(asker, nonce, target, answerer_nonce)
    mac = verify(job_key, role, exchange, message)
    return Question(str(ask), asker, target, nonce, number, extends, mac)


def answering(question: Question, answerer: Peer, answerer_nonce: str) -> Exchange:
    """Return the exchange that the answer to a question belongs to."""
    return Exchange(question.asker, question.nonce, answerer, answerer_nonce)


# -- answer -------------------------------------------------------------------------


def link_answer(job_key: bytes, exchange: Exchange, question_mac: str) -> Message:
    """Return the answer of an agent that accepts a link."""
    body = {"member": exchange.answerer.member, "session": exchange.answerer.session}
    return signed(job_key, Role.LINK_ANSWER, exchange, body, question_mac)


def read_link_answer(
    job_key: bytes, exchange: Exchange, message: Message, question_mac: str
) -> tuple[Exchange, str]:
    """Return the exchange with the answerer's own identity, and its code. Raises `BadPeer`."""
    check_fields(message, ("member", "session", "mac"))
    exchange = exchange._replace(answerer=_answerer(message))
    return exchange, verify(job_key, Role.LINK_ANSWER, exchange, message, question_mac)


def probe_answer(job_key: bytes, exchange: Exchange, facts: Message, question_mac: str) -> Message:
    """Return the answer to a probe; `facts` are the fields of `Answer` without the identity."""
    body = {"member": exchange.answerer.member, "session": exchange.answerer.session, **facts}
    return signed(job_key, Role.PROBE_ANSWER, exchange, body, question_mac)


def read_probe_answer(
    job_key: bytes, exchange: Exchange, message: Message, question_mac: str
) -> tuple[Exchange, Answer]:
    """Return the exchange with the answerer's own identity, and its answer. Raises `BadPeer`."""
    required = ("member", "session", "at", "agent_attached", "workers", "mac")
    check_fields(message, required, ("round", "live_seconds"))
    answerer, at = _answerer(message), message["at"]
    if not isinstance(at, str) or len(at) > _ADDRESS_CHARACTERS:
        raise BadPeer(Refusal.MALFORMED, "at must be an address")
    number, left = message.get("round"), message.get("live_seconds")
    exchange = exchange._replace(answerer=answerer)
    answer = Answer(
        answerer,
        at,
        _flag(message, "agent_attached"),
        read_whole(message, "workers"),
        None if number is None else read_whole(message, "round"),
        None if left is None else read_seconds(message, "live_seconds"),
        verify(job_key, Role.PROBE_ANSWER, exchange, message, question_mac),
    )
    return exchange, answer


def reached_address(name: Any) -> str:
    """Return the comparable form of a TCP socket's own or peer address."""
    address = str(name[0]).partition("%")[0]
    if address.startswith("::ffff:"):  # IPv4 through a socket of both families
        address = address[len("::ffff:") :]
    return f"{address} {name[1]}"


# -- permission ---------------------------------------------------------------------


def permission(
    job_key: bytes, exchange: Exchange, round: int, live_seconds: float, answer_mac: str
) -> Message:
    """Return the line that lets the answerer's workers of `round` live for `live_seconds`."""
    body = {"round": round, "live_seconds": live_seconds}
    return signed(job_key, Role.PROBE_PERMISSION, exchange, body, answer_mac)


def read_permission(
    job_key: bytes, exchange: Exchange, message: Message, answer_mac: str
) -> tuple[int, float]:
    """Return round and seconds of a permission. Raises `BadPeer`."""
    check_fields(message, ("round", "live_seconds", "mac"))
    number, seconds = read_whole(message, "round"), read_seconds(message, "live_seconds")
    verify(job_key, Role.PROBE_PERMISSION, exchange, message, answer_mac)
    return number, seconds


# -- fields -------------------------------------------------------------------------


def check_fields(
    message: Message, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Raise `BadPeer` unless the message has the required fields, and no other than these."""
    unknown = sorted(name for name in message if name not in required and name not in optional)
    if unknown:
        raise BadPeer(Refusal.UNKNOWN_FIELD, f"unknown field {unknown[0][:40]!r}")
    missing = [name for name in required if name not in message]
    if missing:
        raise BadPeer(Refusal.MALFORMED, f"field {missing[0]!r} is missing")


def read_nonce(message: Message) -> str:
    value = message.get("nonce")
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise BadPeer(Refusal.MALFORMED, "nonce must be 32 lowercase hex digits")
    return value


def read_whole(message: Message, name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise BadPeer(Refusal.MALFORMED, f"{name} must be a whole number of at least 0")
    return value


def read_seconds(message: Message, name: str) -> float:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadPeer(Refusal.MALFORMED, f"{name} must be seconds")
    if not 0 <= value <= MAX_SECONDS:
        raise BadPeer(Refusal.MALFORMED, f"{name} must be seconds from 0 to {MAX_SECONDS:g}")
    return float(value)


def _flag(message: Message, name: str) -> bool:
    value = message.get(name)
    if not isinstance(value, bool):
        raise BadPeer(Refusal.MALFORMED, f"{name} must be true or false")
    return value


def _peer(message: Message, name: str) -> Peer:
    value = message.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(_is_name(item) for item in value):
        raise BadPeer(Refusal.MALFORMED, f"{name} must be a member and its session")
    return Peer(value[0], value[1])


def _answerer(message: Message) -> Peer:
    member, session = message["member"], message["session"]
    if not _is_name(member) or not _is_name(session):
        raise BadPeer(Refusal.MALFORMED, "member and session must be names")
    return Peer(member, session)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARACTERS


def _utf8(text: str) -> bytes:
    # JSON may carry half of a surrogate pair, which no other text encodes to.
    return text.encode("utf-8", "surrogatepass")
