"""Values that no member would write, but a stranger might: none may end an agent."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticjob_launcher.proof import BadPeer
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.protocol.coordinator.failure_policy import describe
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import natural_order
from tests.unit.rendezvous.builders import a_failure


def test_too_large_number_is_malformed() -> None:
    stored = b'{"minNodes":1,"maxNodes":2,"settleSeconds":' + b"9" * 400 + b"}"
    with pytest.raises(MalformedRecord, match="too large"):
        decode(RendezvousParams, "/job/state/bounds", stored)


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDC00"])
def test_unpaired_surrogate_is_malformed(half: bytes) -> None:
    """A lone surrogate could be read, but no record that repeats it could be written."""
    stored = b'{"id":"a","session":"s","name":"%s","address":"10.0.0.1","agentPort":1}' % half
    with pytest.raises(MalformedRecord, match="surrogates"):
        decode(Member, "/job/members/a/s", stored)


def test_surrogate_pair_is_valid() -> None:
    stored = b'{"id":"a","session":"s","name":"\\ud83d\\ude00","address":"x","agentPort":1}'
    assert decode(Member, "/job/members/a/s", stored).name == "\U0001f600"


def test_failure_without_exit_is_described() -> None:
    kind = FailureClass.LAUNCH_ERROR
    failure = a_failure("a", kind=kind, exit_code=None, message="no such file: train.py")
    assert "None" not in describe(failure)
    assert "no such file: train.py" in describe(failure)


@given(st.lists(st.text(), max_size=5))
@example(["²", "1"])
def test_any_name_can_be_ordered(names: list[str]) -> None:
    ordered = sorted(names, key=natural_order)
    assert sorted(ordered, key=natural_order) == ordered


def test_deeply_nested_line_is_a_bad_peer() -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"[" * 3000 + b"\n")
        with pytest.raises(BadPeer):
            await wire.read(reader, 5)

    asyncio.run(scenario())
