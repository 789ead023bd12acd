"""Stored form of records: format, tolerance and refusals."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given

from elasticjob_rendezvous.protocol.records.codec import (
    LONGEST_DETAIL,
    LONGEST_MESSAGE,
    LONGEST_NAME,
    LONGEST_TEXT,
    MalformedRecord,
    decode,
    encode,
)
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Done,
    Member,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from tests.unit.rendezvous.protocol.records.any_records import RECORDS, any_record

KEY = "/elasticjob/team/uid/0/bounds"


@pytest.mark.parametrize(
    "said",
    [
        '{"minNodes":0,"maxNodes":2}',
        '{"minNodes":1,"maxNodes":-2}',
        '{"minNodes":1,"maxNodes":2,"increment":0}',
        '{"minNodes":1,"maxNodes":2,"maxRestarts":-1}',
        '{"minNodes":1,"maxNodes":2,"keepAliveSeconds":-1}',
        '{"minNodes":1,"maxNodes":2,"confirmSeconds":1e300}',
    ],
)
def test_parameters_without_possible_round_are_malformed(said: str) -> None:
    with pytest.raises(MalformedRecord, match="must be"):
        decode(RendezvousParams, KEY, said.encode())


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", "9" * 400, "9" * 5000])
def test_number_that_is_not_finite_is_malformed(value: str) -> None:
    stored = f'{{"minNodes":1,"maxNodes":2,"leaveSeconds":{value}}}'
    with pytest.raises(MalformedRecord):
        decode(RendezvousParams, KEY, stored.encode())


@pytest.mark.parametrize(
    ("field", "most"),
    [("round", 2**31 - 1), ("startMs", 2**53), ("step", 2**63 - 1), ("lease", 2**63 - 1)],
)
@pytest.mark.parametrize("sign", ["", "-"])
def test_number_out_of_range_is_malformed(field: str, most: int, sign: str) -> None:
    stored = '{"id":"a","session":"s","name":"n","address":"x","agentPort":1,"%s":%s%s}'
    decode(Member, KEY, (stored % (field, sign, most)).encode())
    with pytest.raises(MalformedRecord, match="out of range"):
        decode(Member, KEY, (stored % (field, sign, most + 1)).encode())


def test_number_out_of_range_in_a_list_or_row_is_malformed() -> None:
    charged = '{"number":1,"state":"final","cause":{"kind":"join"},"charged":[1,4294967296]}'
    with pytest.raises(MalformedRecord, match="out of range"):
        decode(Round, KEY, charged.encode())
    seat = RankAssignment("i", "n", "a", 1, "r", 2**31, 0, 0, 1)
    with pytest.raises(MalformedRecord, match="out of range"):
        decode(Roster, KEY, encode(Roster(1, 1, "a", 1, (seat,))))


@pytest.mark.parametrize(
    "text", ["x" * 20_000, "\u00e9" * 20_000, "\x1b" * 20_000], ids=["ascii", "accents", "escapes"]
)
def test_long_text_is_clipped_to_the_limit_of_its_field(text: str) -> None:
    failure = Failure(
        1, text, text, 0, 0, FailureClass.SIGNAL, 1, message=text, traceback=text + "end", node=text
    )
    found = decode(Failure, KEY, encode(failure))
    sizes = {name: len(getattr(found, name).encode()) for name in ("name", "node", "member")}
    assert sizes["name"] <= LONGEST_NAME
    assert max(sizes.values()) <= LONGEST_TEXT
    assert max(len(found.message.encode()), len(found.traceback.encode())) <= LONGEST_MESSAGE
    assert found.message.endswith("…")
    assert found.traceback.startswith("…")
    assert found.traceback.endswith("end")
    cause = Cause(CauseKind.LEAVE, (text,), text, reasons=(text,))
    seat = RankAssignment("i", text, text, 1, "r", 0, 0, 0, 1)
    opened = decode(Round, KEY, encode(Round(1, RoundState.FINAL, cause, master_name=text)))
    assert len(opened.cause.members[0].encode()) <= LONGEST_NAME
    assert opened.master_name == found.name == opened.cause.members[0]
    assert len(opened.cause.detail.encode()) <= LONGEST_DETAIL
    assert len(opened.cause.reasons[0].encode()) <= LONGEST_DETAIL
    roster = decode(Roster, KEY, encode(Roster(1, 1, text, 1, (seat,))))
    assert roster.seats[0].name == found.name, "one name is the same in every record"


def test_longest_name_of_a_pod_is_kept() -> None:
    found = decode(Done, KEY, encode(Done(1, "m", "p" * LONGEST_NAME)))
    assert found.name == "p" * LONGEST_NAME


@given(any_record())
def test_encoded_record_decodes_equal(record: Any) -> None:
    stored = encode(record).decode()
    found = decode(type(record), KEY, stored.encode())
    assert decode(type(record), KEY, encode(found)) == found
    if stored.isprintable() and stored.isascii() and "\\" not in stored and short(stored):
        assert found == record


def short(stored: str) -> bool:
    return all(len(text) <= LONGEST_NAME for text in stored.split('"'))


NASTY = (
    "a\x1b[2J\x9b0m\x07\r\x00\x7f\u202e\u2066\u200b\u2028\ufeff\U000e0041"
    "\nb\tc \u00e9\u4e2d\U0001f600"
)
READABLE = (
    r"a\x1b[2J\x9b0m\x07\r\x00\x7f\u202e\u2066\u200b\u2028\ufeff\U000e0041"
    "{newline}b\tc \u00e9\u4e2d\U0001f600"
)


def test_texts_of_a_decoded_record_are_printable() -> None:
    failure = Failure(
        1, NASTY, NASTY, 0, 0, FailureClass.PEER_ABORT, 1, message=NASTY, traceback=NASTY
    )
    found = decode(Failure, KEY, encode(failure))
    line = READABLE.format(newline=r"\n")
    assert (found.member, found.name) == (line, line[: LONGEST_NAME - 3] + "…")
    assert (found.message, found.traceback) == (READABLE.format(newline="\n"),) * 2


@pytest.mark.parametrize("ascii_only", [True, False])
def test_texts_in_the_rows_of_a_roster_are_printable(ascii_only: bool) -> None:
    seat = RankAssignment("i\x1b", "n\u202e\n", "a", 1, "r", 0, 0, 0, 1)
    roster = Roster(1, 1, "a\x85", 1, (seat,))
    stored = json.dumps(json.loads(encode(roster)), ensure_ascii=ascii_only).encode()
    found = decode(Roster, KEY, stored)
    assert (found.seats[0].id, found.seats[0].name) == (r"i\x1b", r"n\u202e\n")
    assert found.master_address == r"a\x85"


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_fields_at_default_are_omitted(kind: type[Any]) -> None:
    given_ = {
        f.name: value
        for f in fields(kind)
        if f.default is MISSING and (value := _some(f.name)) is not None
    }
    stored = encode(kind(**given_)).decode()
    for field in fields(kind):
        head, *rest = field.name.split("_")
        name = f'"{head + "".join(part.title() for part in rest)}":'
        assert (name in stored) is (field.default is MISSING)


def _some(name: str) -> Any:
    """Return a value for a field without a default."""
    special = {"state": RoundState.FINAL, "kind": "UserError", "seats": ()}
    special["cause"] = Cause(CauseKind.JOIN)  # type: ignore[assignment]
    numbers = ("number", "round", "port", "size", "rank", "nodes", "at_ms")
    return special.get(name, 1 if name.endswith(numbers) else "x")


def test_names_are_camel_case_and_enums_are_their_values() -> None:
    bounds = RendezvousParams(
        1, 2, stop_grace_seconds=4.5, marks=(DrainRequest("id-a", "scaled down"),)
    )
    assert encode(bounds) == (
        b'{"minNodes":1,"maxNodes":2,"stopGraceSeconds":4.5,'
        b'"marks":[{"member":"id-a","reason":"scaled down"}]}'
    )
    assert encode(Outcome(OutcomeKind.TIMED_OUT, "späť")) == (
        '{"kind":"timedOut","detail":"späť"}'.encode()
    )


def test_unknown_fields_of_newer_release_are_ignored() -> None:
    stored = (
        b'{"number":3,"state":"joinable","future":{"a":[1]},'
        b'"cause":{"kind":"loss","weight":2,"members":["a"]}}'
    )
    assert decode(Round, KEY, stored) == Round(
        3, RoundState.JOINABLE, Cause(CauseKind.LOSS, ("a",))
    )


def test_missing_fields_of_older_release_have_defaults() -> None:
    assert decode(RendezvousParams, KEY, b'{"minNodes":2,"maxNodes":3}') == RendezvousParams(2, 3)


def test_integer_seconds_decode_as_float() -> None:
    bounds = decode(RendezvousParams, KEY, b'{"minNodes":1,"maxNodes":1,"settleSeconds":3}')
    assert bounds.settle_seconds == 3.0
    assert isinstance(bounds.settle_seconds, float)


@pytest.mark.parametrize(
    ("stored", "fault"),
    [
        (b"", "JSONDecodeError"),
        (b"{", "JSONDecodeError"),
        (b"\xff\xfe\xfd", "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"7", "not a dict"),
        (b"null", "not a dict"),
        (b'["minNodes"]', "not a dict"),
        (b'{"minNodes":1}', "maxNodes is missing"),
        (b'{"minNodes":"1","maxNodes":2}', "'1' is not a int"),
        (b'{"minNodes":1.0,"maxNodes":2}', "1.0 is not a int"),
        (b'{"minNodes":true,"maxNodes":2}', "True is not a int"),
        (b'{"minNodes":null,"maxNodes":2}', "None is not a int"),
        (b'{"minNodes":1,"maxNodes":2,"expected":"all"}', "'all' is not a int"),
        (b'{"minNodes":1,"maxNodes":2,"settleSeconds":"3s"}', "'3s' is not a"),
        (b'{"minNodes":1,"maxNodes":2,"settleSeconds":true}', "True is not a"),
        (b'{"minNodes":1,"maxNodes":2,"marks":{}}', "not a list"),
        (b'{"minNodes":1,"maxNodes":2,"marks":[7]}', "not a dict"),
        (b'{"minNodes":1,"maxNodes":2,"marks":[{"member":"a"}]}', "reason is missing"),
    ],
)
def test_malformed_record_names_its_key_and_fault(stored: bytes, fault: str) -> None:
    with pytest.raises(MalformedRecord) as caught:
        decode(RendezvousParams, KEY, stored)
    assert caught.value.key == KEY
    assert repr(KEY) in str(caught.value)
    assert fault in str(caught.value)


def test_unknown_enum_value_is_malformed() -> None:
    with pytest.raises(MalformedRecord, match="'paused' is not a valid RoundState"):
        decode(Round, KEY, b'{"number":1,"state":"paused","cause":{"kind":"start"}}')


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ("OutOfMemory", FailureClass.OUT_OF_MEMORY),
        ("PeerAbort", FailureClass.PEER_ABORT),
        ("Eclipse", FailureClass.USER_ERROR),
    ],
    ids=["of an older release", "of every release", "of a newer release"],
)
def test_failure_class_of_every_release_is_read(stored: str, kind: FailureClass) -> None:
    value = (
        f'{{"round":1,"member":"a","name":"a","rank":0,"localRank":0,"kind":"{stored}","atMs":5}}'
    )
    assert decode(Failure, "k", value.encode()).kind is kind


def test_failure_class_that_is_no_text_is_malformed() -> None:
    value = b'{"round":1,"member":"a","name":"a","rank":0,"localRank":0,"kind":5,"atMs":5}'
    with pytest.raises(MalformedRecord):
        decode(Failure, "k", value)
