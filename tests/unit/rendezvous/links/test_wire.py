"""Signed lines that agents exchange."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_launcher.probe import signature
from elasticjob_rendezvous.links import wire

KEY = b"the job's key"
BODY = {"member": "id-a", "session": "s1", "workers": 2, "agent_attached": False}
plain = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "hmac"),
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    max_size=4,
)


def signed(**changes: Any) -> dict[str, Any]:
    body = {**BODY, **changes}
    return {**body, "hmac": wire.sign(KEY, "question", body)}


@given(plain, st.text(max_size=8))
def test_signed_answer_is_verified(body: dict[str, Any], question: str) -> None:
    body["hmac"] = wire.sign(KEY, question, body)
    assert wire.verified(KEY, question, body)
    assert wire.verified(KEY, question, dict(reversed(body.items())))
    assert not wire.verified(KEY, question + "x", body)
    assert not wire.verified(b"another key", question, body)


@pytest.mark.parametrize(
    "forged",
    [
        BODY,
        {**signed(), "workers": 3},
        {**signed(), "more": 1},
        {name: value for name, value in signed().items() if name != "session"},
        {**signed(), "hmac": ""},
        {**signed(), "hmac": None},
        {**signed(), "hmac": 7},
        {**signed(), "hmac": signed()["hmac"].upper()},
    ],
    ids=["none", "changed", "more", "less", "empty", "null", "number", "upper case"],
)
def test_forged_answer_is_not_verified(forged: dict[str, Any]) -> None:
    assert wire.verified(KEY, "question", signed())
    assert not wire.verified(KEY, "question", forged)


@given(plain, st.text("0123456789abcdef", min_size=16, max_size=32))
def test_launcher_and_agent_signatures_are_equal(body: dict[str, Any], nonce: str) -> None:
    assert wire.sign(KEY, nonce, body) == signature(KEY, nonce, body)


def test_nonces_are_unique_and_valid_for_a_launcher() -> None:
    nonces = {wire.nonce() for _ in range(50)}
    assert len(nonces) == 50
    assert all(len(nonce) == 32 and int(nonce, 16) >= 0 for nonce in nonces)


def read(*chunks: bytes, end: bool = False, seconds: float = 5) -> Any:
    async def scenario() -> Any:
        reader = asyncio.StreamReader(limit=wire.MAX_LINE_BYTES)
        for chunk in chunks:
            reader.feed_data(chunk)
        if end:
            reader.feed_eof()
        return await wire.read(reader, seconds)

    return asyncio.run(scenario())


def test_message_may_arrive_in_pieces() -> None:
    assert read(b'{"round"', b': 7}\n{"next": 1}\n') == {"round": 7}
    assert read(wire.line({"a": "ä"})) == {"a": "ä"}


@pytest.mark.parametrize(
    "raw",
    [b"\n", b"7\n", b"[]\n", b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b"x" * 9000 + b"\n"],
    ids=["empty", "number", "list", "http", "bytes", "long"],
)
def test_line_that_is_no_object_is_a_bad_peer(raw: bytes) -> None:
    with pytest.raises(wire.BadPeer):
        read(raw)


def test_end_of_stream_and_silence_are_distinguished() -> None:
    with pytest.raises(EOFError):
        read(b'{"half":', end=True)
    with pytest.raises(TimeoutError):
        read(b'{"half":', seconds=0.01)


def test_leave_notice_of_a_peer_is_printable() -> None:
    (notice,) = wire.leaving_told({"leaving": {"id\x1b": ["agent\n", "why\u202e\x9b"]}})
    assert (notice.id, notice.agent, notice.reason) == (r"id\x1b", r"agent\n", r"why\u202e\x9b")
