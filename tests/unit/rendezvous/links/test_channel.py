"""Authenticated lines of an established link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_launcher.proof import BadPeer, Exchange, Peer, Refusal
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.links.wire import Channel

KEY = b"the job's key"
EXCHANGE = Exchange(Peer("id-b", "s2"), "0" * 32, Peer("id-a", "s1"), "1" * 32)
ANSWER_MAC = "f" * 64
BEAT = {"heard": 0, "round": 7}


def channel(coordinates: bool, exchange: Exchange = EXCHANGE, key: bytes = KEY) -> Channel:
    return Channel(key, exchange, ANSWER_MAC, coordinates)


def refused(receiver: Channel, line: bytes) -> Refusal:
    with pytest.raises(BadPeer) as error:
        receiver.open(line)
    return error.value.reason


def test_lines_of_both_directions_are_opened_in_order() -> None:
    member, coordinator = channel(False), channel(True)
    for number in range(300):
        assert coordinator.open(member.seal({"heard": number})) == {"heard": number}
        assert member.open(coordinator.seal({"round": number})) == {"round": number}
    assert coordinator.open(member.seal({"a": "\u00e4 \n"})) == {"a": "\u00e4 \n"}


def test_replayed_line_is_refused() -> None:
    member, coordinator = channel(False), channel(True)
    line = coordinator.seal(BEAT)
    member.open(line)
    assert refused(member, line) is Refusal.WRONG_LINE


def test_lost_or_reordered_line_is_refused() -> None:
    member, coordinator = channel(False), channel(True)
    first, second = coordinator.seal(BEAT), coordinator.seal(BEAT)
    assert refused(member, second) is Refusal.WRONG_LINE
    member.open(first)
    member.open(second)


def test_reflected_line_is_refused() -> None:
    coordinator = channel(True)
    assert refused(coordinator, coordinator.seal(BEAT)) is Refusal.WRONG_LINE
    member = channel(False)
    assert refused(member, member.seal(BEAT)) is Refusal.WRONG_LINE


@pytest.mark.parametrize(
    "other",
    [
        channel(True, EXCHANGE._replace(asker_nonce="2" * 32)),
        channel(True, EXCHANGE._replace(answerer_nonce="2" * 32)),
        channel(True, EXCHANGE._replace(asker=Peer("id-c", "s2"))),
        channel(True, EXCHANGE._replace(answerer=Peer("id-a", "s9"))),
        channel(True, key=b"another job's key"),
    ],
    ids=["asker nonce", "answerer nonce", "asker", "answerer", "key"],
)
def test_line_of_another_link_is_refused(other: Channel) -> None:
    assert refused(channel(False), other.seal(BEAT)) is Refusal.WRONG_LINE


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b"7", b"8", 1),
        lambda line: b'{"heard":0,"round":7}\n',
        lambda line: b'{"heard":0,"round":7} \n',
        lambda line: line.upper(),
        lambda line: line[:-2] + b"\n",
        lambda line: b" " + line,
        lambda line: line[-66:],
        lambda line: b"\n",
        lambda line: b"\xff" + line,
    ],
    ids=["body", "no code", "empty code", "case", "short", "space", "no body", "empty", "bytes"],
)
def test_changed_line_is_refused(change: Callable[[bytes], bytes]) -> None:
    line = change(channel(True).seal(BEAT))
    assert refused(channel(False), line) is Refusal.WRONG_LINE


@given(st.binary(max_size=120))
def test_invented_line_is_refused(line: bytes) -> None:
    assert refused(channel(False), line) is Refusal.WRONG_LINE


def test_longest_heartbeat_fits_into_a_line() -> None:
    leaving = {"leaving": {"x": ["n", "y" * (wire.MAX_LEAVING_BYTES - 40)]}}
    line = channel(True).seal({"heard": 2**62, "round": 2**62, "vouched_seconds": 1.0, **leaving})
    assert len(line) < wire.MAX_LINE_BYTES
