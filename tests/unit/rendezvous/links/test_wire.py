"""Lines that agents exchange."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elasticjob_launcher.proof import BadPeer, Refusal
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.links.wire import Heartbeat, coordinator_heartbeat, member_heartbeat
from elasticjob_rendezvous.protocol.records.members import LeaveNotice


def test_heartbeats_are_read() -> None:
    leaving = {"leaving": {"b": ["n", "drained"]}}
    notices = (LeaveNotice("b", "n", "drained"),)
    assert member_heartbeat({"heard": 3}) == Heartbeat(3)
    assert member_heartbeat({"heard": 3, **leaving}) == Heartbeat(3, leaving=notices)
    told = {"heard": 3, "round": 7, "vouched_seconds": 1.5, **leaving}
    assert coordinator_heartbeat(told) == Heartbeat(3, 7, 1.5, notices)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({}, Refusal.MALFORMED),
        ({"heard": 0}, Refusal.MALFORMED),
        ({"heard": 0, "round": True}, Refusal.MALFORMED),
        ({"heard": -1, "round": 1}, Refusal.MALFORMED),
        ({"heard": 2**70, "round": 1}, Refusal.MALFORMED),
        ({"heard": 0.5, "round": 1}, Refusal.MALFORMED),
        ({"heard": 0, "round": 1, "vouched_seconds": None}, Refusal.MALFORMED),
        ({"heard": 0, "round": 1, "vouched_seconds": float("nan")}, Refusal.MALFORMED),
        ({"heard": 0, "round": 1, "vouched_seconds": 1e9}, Refusal.MALFORMED),
        ({"heard": 0, "round": 1, "leaving": []}, Refusal.MALFORMED),
        ({"heard": 0, "round": 1, "count": 1}, Refusal.UNKNOWN_FIELD),
    ],
    ids=str,
)
def test_unexpected_heartbeat_is_refused(message: dict[str, Any], reason: Refusal) -> None:
    with pytest.raises(BadPeer) as refused:
        coordinator_heartbeat(message)
    assert refused.value.reason is reason


def test_member_sends_no_round() -> None:
    with pytest.raises(BadPeer, match="UnknownField: unknown field 'round'"):
        member_heartbeat({"heard": 0, "round": 7})


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
    with pytest.raises(BadPeer):
        read(raw)


def test_end_of_stream_and_silence_are_distinguished() -> None:
    with pytest.raises(EOFError):
        read(b'{"half":', end=True)
    with pytest.raises(TimeoutError):
        read(b'{"half":', seconds=0.01)


def test_leave_notice_of_a_peer_is_printable() -> None:
    (notice,) = wire.read_leaving({"leaving": {"id\x1b": ["agent\n", "why\u202e\x9b"]}})
    assert (notice.id, notice.agent, notice.reason) == (r"id\x1b", r"agent\n", r"why\u202e\x9b")
