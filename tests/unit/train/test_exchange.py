"""Records of the ranks: protocols of their libraries, calls, and the bytes on the wire."""

from __future__ import annotations

import enum
import struct

import pytest

from elasticjob.train import SnapshotError
from elasticjob.train.snapshots.core.agreement import SHARED, Missing, Offer, Part, Version
from elasticjob.train.snapshots.core.exchange import (
    FIRST_BYTES,
    INLINE_BYTES,
    OURS,
    RECORD_BYTES,
    Begin,
    Call,
    End,
    Exchange,
    Header,
    Proposal,
    Protocols,
    RestoreMessage,
    check_calls,
    common_protocol,
    inline_content,
    pack_first,
    pack_message,
    pack_record,
    unpack_begins,
    unpack_header,
    unpack_message,
    unpack_proposals,
)
from elasticjob.train.snapshots.core.replicas import State


def test_first_record_keeps_the_form_that_later_libraries_read() -> None:
    assert pack_first(Protocols(1, 2)) == b"\1\0\2\0EJ\xff\xff"
    # Version 0.1.0 exchanges the size of its message first, as an integer of as many bytes.
    assert struct.calcsize("<q") == FIRST_BYTES
    assert struct.unpack("<q", pack_first(OURS))[0] < 0


@pytest.mark.parametrize(
    ("protocols", "expected"),
    [
        ([(1, 1), (1, 1)], 1),
        ([(1, 3), (1, 1), (1, 2)], 1),
        ([(2, 4), (1, 3)], 3),
    ],
)
def test_newest_protocol_that_all_ranks_can_use_is_used(
    protocols: list[tuple[int, int]], expected: int
) -> None:
    assert common_protocol([pack_first(Protocols(*each)) for each in protocols]) == expected


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (pack_first(Protocols(6, 7)), pack_first(OURS), "rank 1 has an older .* than rank 0"),
        (pack_first(OURS), pack_first(Protocols(6, 7)), r"older .* \(5 to 5 and 6 to 7\): install"),
        (
            pack_first(Protocols(1, 1)),
            pack_first(OURS),
            r"rank 0 .* \(1 to 1 and 5 to 5\): install",
        ),
        (struct.pack("<q", 40), pack_first(OURS), r"rank 0 has an older .* \(none and 5 to 5\)"),
        (pack_first(OURS), struct.pack("<q", 0), r"rank 1 has an older .* \(none and 5 to 5\)"),
    ],
)
def test_ranks_without_a_common_protocol_are_an_error(
    first: bytes, second: bytes, text: str
) -> None:
    with pytest.raises(SnapshotError, match=text):
        common_protocol([first, second])


@pytest.mark.parametrize("size", [0, INLINE_BYTES, INLINE_BYTES + 1])
def test_record_has_one_size_and_a_short_content(size: int) -> None:
    header, content = Header(Call.SAVE, Exchange.HOLD, size, 2**63 - 1), b"x" * size
    record = memoryview(pack_record(header, content))
    assert record.nbytes == RECORD_BYTES
    assert unpack_header(record) == header
    found = bytes(inline_content(record, size))
    assert found == (content if size <= INLINE_BYTES else bytes(INLINE_BYTES))


SAVES = Header(Call.SAVE, Exchange.PROPOSALS, 9, 7)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            Header(Call.RESTORE, Exchange.SETTINGS, 4, 0),
            r"rank 0 has called save\(\) of step 7, and rank 1 restore\(\): all ranks must",
        ),
        (SAVES._replace(step=8), r"save\(\) has step=7 on rank 0, and step=8 on rank 1: all ranks"),
        (
            SAVES._replace(exchange=Exchange.STORED),
            r"rank 0 exchanges proposals in save\(\) of step 7, and rank 1 stored: all ranks",
        ),
        (SAVES._replace(exchange=200), "rank 1 number 200: all ranks"),
    ],
)
def test_ranks_in_different_calls_are_an_error(other: Header, text: str) -> None:
    check_calls([SAVES, SAVES._replace(size=1)])
    with pytest.raises(SnapshotError, match=text):
        check_calls([SAVES, other])


SHARED_PART = Part(Version(5, 9), SHARED, 2, 3)
MESSAGE = RestoreMessage(
    Offer((SHARED_PART,), (), (SHARED_PART._replace(rank=1, reshards=True, at_stop=True),)),
    trouble="no",
    is_listed=True,
    complete=4,
    damage="bad",
    owner="a/b",
    job="a/c",
)


def test_records_of_the_protocol_keep_their_bytes() -> None:
    """A change needs another protocol: nodes with both libraries meet during a rolling update."""
    proposal = Proposal(True, False, 5, 2, False, True, False, 3, -1)
    begin = Begin(7, True, False, True, False, -1, 9, 12, 3, 2.0, 60.5, 0.25, True, False)
    assert Protocols(5, 5) == OURS
    assert proposal.packed() == bytes.fromhex("0100050000000000000002" + "00010003" + "ff" * 8)
    assert begin.packed() == bytes.fromhex(
        "07000000" + "01000100" + "ff" * 8 + "09" + "00" * 7 + "0c" + "00" * 7 + "03"
        "00000040" + "00007242" + "0000803e" + "0100"
    )
    assert len(begin.packed()) <= INLINE_BYTES
    assert unpack_proposals([proposal.packed()] * 2) == [proposal] * 2
    assert unpack_begins([begin.packed()]) == [begin]
    assert pack_record(SAVES, b"ab").startswith(bytes.fromhex("010a0000090000000700000000000000"))
    assert pack_message(MESSAGE) == (
        b'[[[[5, 9, -1, 2, 3, false, false]], [], [[5, 9, 1, 2, 3, true, true]]], "no", false, '
        b'true, -1, 4, "bad", "a/b", "a/c"]'
    )
    assert unpack_message(memoryview(pack_message(MESSAGE))) == MESSAGE


NUMBERS: dict[type[enum.Enum], str] = {
    Call: "RESTORE=0 SAVE=1",
    End: "CLOSE=close PROCESS=process",
    Exchange: "SETTINGS=0 SETTINGS_TEXTS=1 OFFERS=2 READS=3 BEGIN=4 SHARDS=5 FOLDERS=6 ADDRESSES=7 "
    "COPIES=8 HOLD=9 PROPOSALS=10 STORED=11 OWN_PARTS=12 KEPT=13 TENSORS=14",
    Missing: "MEMORY=1 STORAGE=2 CHANGED=4",
    State: "IDLE=0 RUNNING=1 DONE=2 FAILED=3",
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_in_records_keep_their_meaning(kind: type[enum.Enum]) -> None:
    assert " ".join(f"{each.name}={each.value}" for each in kind) == NUMBERS[kind]
    assert Protocols(5, 5) == OURS, "other numbers need another protocol"


@pytest.mark.parametrize(("field", "name"), [("has_rank_state", "rank_state"), ("stores", "store")])
def test_calls_of_save_with_other_values_are_an_error(field: str, name: str) -> None:
    mine = Proposal(False, False, 5, 0, False, False, False, 0, -1)
    other = mine._replace(**{field: True})
    with pytest.raises(SnapshotError, match=rf"{name}=False on rank 0, and {name}=True on rank 1"):
        unpack_proposals([mine.packed(), other.packed()])
