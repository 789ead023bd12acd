"""Pickle that torch reads and writes, and refusals to read others."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import pickletools
import struct
import sys
import types
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_rendezvous.api import RendezvousStateError
from elasticjob_rendezvous.dynamic import wire
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State

# pickle.dumps of a state in torch 2.13.
OF_TORCH = base64.b64decode(
    "gASVwAEAAAAAAACMN3RvcmNoLmRpc3RyaWJ1dGVkLmVsYXN0aWMucmVuZGV6dm91cy5keW5hbWljX3JlbmRlenZvdX"
    "OUjBBfUmVuZGV6dm91c1N0YXRllJOUKYGUfZQojAVyb3VuZJRLBIwIY29tcGxldGWUiIwIZGVhZGxpbmWUTowGY2xv"
    "c2VklImMDHBhcnRpY2lwYW50c5R9lChoAIwJX05vZGVEZXNjlJOUKYGUfZQojARhZGRylIwGbm9kZS0ylIwDcGlklE"
    "sHjAhsb2NhbF9pZJRLAHViSwFoDCmBlH2UKGgPjAdub2RlLTEwlGgRSwhoEksBdWJLAHWMCXdhaXRfbGlzdJSPlCho"
    "DCmBlH2UKGgPjAZub2RlLTOUaBFLCWgSSwB1YpCMD3JlZHVuZGFuY3lfbGlzdJSPlIwPbGFzdF9oZWFydGJlYXRzlH"
    "2UKGgNjAhkYXRldGltZZSMCGRhdGV0aW1llJOUQwoH6gECAwQFAAKmlGgfjAh0aW1lem9uZZSTlGgfjAl0aW1lZGVs"
    "dGGUk5RLAEsASwCHlFKUhZRSlIaUUpRoE2ghQwoH6gECAwQGAAKmlGgqhpRSlGgYaCx1dWIu"
)
TIME = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
A, B, C = NodeDesc("node-2", 7, 0), NodeDesc("node-10", 8, 1), NodeDesc("node-3", 9, 0)
SAME = State(
    round=4,
    complete=True,
    participants={A: 1, B: 0},
    wait_list=frozenset({C}),
    last_heartbeats={A: TIME, B: TIME + timedelta(seconds=1), C: TIME},
)

node_descs = st.builds(NodeDesc, st.text(), st.integers(), st.integers(0, 2**40))
times = st.datetimes(timezones=st.just(UTC))
plain: st.SearchStrategy = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
)
plain = plain | st.binary() | times | node_descs
extras = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=10,
)
known = set(State.__slots__)
states = st.builds(
    State,
    round=st.integers(0),
    complete=st.booleans(),
    deadline=st.none() | times,
    closed=st.booleans(),
    participants=st.dictionaries(node_descs, st.integers()),
    wait_list=st.frozensets(node_descs),
    redundancy_list=st.frozensets(node_descs),
    last_heartbeats=st.dictionaries(node_descs, times),
    extra=st.dictionaries(st.text().filter(lambda name: name not in known), extras),
)


def test_reads_state_written_by_torch() -> None:
    assert wire.decode(OF_TORCH) == SAME


def test_encoded_state_names_only_torch_classes_and_datetimes() -> None:
    words: list[object] = []
    named = set()
    for opcode, argument, _ in pickletools.genops(wire.encode(SAME)):
        if opcode.name == "STACK_GLOBAL":
            named.add(tuple(words[-2:]))
        elif opcode.name == "BINUNICODE":
            words.append(argument)
    assert named == {
        (wire.TORCH_MODULE, "_RendezvousState"),
        (wire.TORCH_MODULE, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timezone"),
        ("datetime", "timedelta"),
    }
    assert wire.encode(SAME)[:2] == pickle.PROTO + b"\x04"


@settings(max_examples=150, deadline=None)
@given(states)
def test_encoding_is_deterministic_and_round_trips(state: State) -> None:
    data = wire.encode(state)
    assert wire.decode(data) == state
    assert wire.encode(wire.decode(data)) == data


class Calls:
    """Object whose unpickling would call a function."""

    def __reduce__(self) -> tuple:
        return (os.getpid, ())


def altered(old: bytes, new: bytes, data: bytes | None = None) -> bytes:
    data = data or wire.encode(SAME)
    assert old in data
    return data.replace(old, new, 1)


def sized(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "corrupt"),
        (b"garbage", "corrupt"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "LONG_BINPUT"),  # the real one would take 16 GB
        (b"\x80\x04X\xff\xff\xff\x7fabc.", "corrupt"),
        (b"\x80\x04]\x94h\x00a.", "second reference to a list"),
        (b"\x80\x04}()tNu.", "corrupt"),
        (b"\x80\x04})\x85Ns.", "a tuple as a key"),
        (b"\x80\x04}()Nu.", "a tuple as a key"),
        (b"\x80\x04(NN.", "values instead of one"),
        (b"\x80\x04N}b.", "attributes for a value that takes none"),
        (b"\x80\x04NN\x86)R.", "a call of a value that is not a class"),
        (b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".", "a list instead"),
        (OF_TORCH[:-20], "corrupt"),
        (pickle.dumps(Calls()), "posix.getpid"),
        (pickle.dumps({"round": 1}), "a dict instead of a State"),
        (pickle.dumps(TIME), "a datetime instead of a State"),
        (b"\x80\x04P1\n.", "corrupt"),
        (altered(sized("round"), sized("wound")), "'round'"),
        (altered(b"\x03pid", b"\x03pit", OF_TORCH), "pid"),
        (altered(sized("complete") + b"\x88", sized("complete") + b"N"), "complete is a NoneType"),
        (altered(sized("_NodeDesc"), sized("_OtherOne")), "_OtherOne"),
        (altered(sized("deadline") + b"N", sized("deadline") + b"\x88"), "deadline is a bool"),
    ],
)
def test_value_that_is_no_state_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(RendezvousStateError, match=why):
        wire.decode(data)


def test_heartbeat_without_a_time_zone_is_refused() -> None:
    naive = State(last_heartbeats={A: TIME.replace(tzinfo=None)})
    with pytest.raises(RendezvousStateError, match="no time zone"):
        wire.decode(wire.encode(naive))


def test_too_long_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_STATE_BYTES", 100)
    with pytest.raises(RendezvousStateError, match="more than 100"):
        wire.decode(OF_TORCH)


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # pickletools'
@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(OF_TORCH) - 1), st.binary(min_size=1, max_size=4))
def test_damaged_state_raises_only_state_errors(place: int, noise: bytes) -> None:
    data = OF_TORCH[:place] + noise + OF_TORCH[place + len(noise) :]
    with contextlib.suppress(RendezvousStateError):
        assert isinstance(wire.decode(data), State)


def test_unencodable_field_is_a_state_error() -> None:
    with pytest.raises(RendezvousStateError, match="cannot hold a object"):
        wire.encode(State(extra={"field": object()}))


class StandIn:
    """Substitute for torch's class, by name, in a pickle made by Python."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __hash__(self) -> int:
        return id(self)


@pytest.mark.parametrize("count", [0, 1, 2, 1001])
def test_reads_any_number_of_nodes_as_pickled(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's pickler writes one item, several, and batches of 1000 in different ways."""
    module = types.ModuleType(wire.TORCH_MODULE)
    state_class = type("_RendezvousState", (StandIn,), {"__module__": wire.TORCH_MODULE})
    node_class = type("_NodeDesc", (StandIn,), {"__module__": wire.TORCH_MODULE})
    vars(module).update(_RendezvousState=state_class, _NodeDesc=node_class)
    monkeypatch.setitem(sys.modules, wire.TORCH_MODULE, module)
    named = [node_class(addr=f"n{index}", pid=1, local_id=0) for index in range(count)]
    stored = state_class(
        round=1,
        complete=False,
        deadline=TIME,
        closed=False,
        participants=dict.fromkeys(named, 0),
        wait_list=set(named),
        redundancy_list=set(),
        last_heartbeats=dict.fromkeys(named, TIME),
    )
    nodes = [NodeDesc(f"n{index}", 1, 0) for index in range(count)]
    assert wire.decode(pickle.dumps(stored, 4)) == State(
        round=1,
        deadline=TIME,
        participants=dict.fromkeys(nodes, 0),
        wait_list=frozenset(nodes),
        last_heartbeats=dict.fromkeys(nodes, TIME),
    )
