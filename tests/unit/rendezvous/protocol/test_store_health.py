"""Reports of a store failure and of its end: times and texts."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    EtcdError,
    NotEtcd,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from elasticjob_rendezvous.etcd.probe import failure_of
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.store_health import TOLERATED_SECONDS, Failed, StoreHealth
from elasticjob_rendezvous.protocol.store_trouble import (
    LONGEST_TEXT,
    StoreFailure,
    StoreState,
    StoreTrouble,
    bounded_line,
    endpoints_text,
    read_trouble,
)

UNREACHABLE, REFUSING = StoreState.UNREACHABLE, StoreState.REFUSING
FULL = Failed(REFUSING, "etcdserver: mvcc: database space exceeded", StoreFailure.NO_SPACE)
GONE = Failed(UNREACHABLE, "Connection refused")


def at(seconds: float) -> Clock:
    return Clock(seconds, round(seconds * 1000))


def health() -> StoreHealth:
    return StoreHealth("etcd", "etcd:2379")


def fail(one: StoreHealth, failure: Failed, sent: float, now: float) -> list[tuple[bool, str]]:
    return [(note.warning, note.text) for note in one.failed(failure, at(sent), at(now))]


def test_short_store_trouble_is_not_reported() -> None:
    one = health()
    assert fail(one, GONE, 1.0, 1.0 + TOLERATED_SECONDS - 0.1) == []
    assert one.trouble is None
    assert one.succeeded(at(3.0)) == []


def test_store_trouble_is_reported_once_and_its_end_with_the_duration() -> None:
    one = health()
    assert fail(one, FULL, 1.0, 1.1) == []
    [(warning, text)] = fail(one, FULL, 2.0, 2.4)
    assert warning
    assert text.startswith(f"etcd at etcd:2379 refuses writes: {FULL.text}; ")
    assert one.trouble == StoreTrouble(
        "etcd", REFUSING, "etcd:2379", FULL.text, 1000, StoreFailure.NO_SPACE
    )
    assert fail(one, FULL, 3.0, 3.1) == []
    assert one.failing_seconds(3.5) == 2.5, "since the first probe that failed"
    [note] = one.succeeded(at(13.5))
    assert (note.warning, note.text) == (
        False, "etcd at etcd:2379 accepts writes again after 12.5 s"
    )  # fmt: skip
    assert one.trouble is None
    assert one.failing_seconds(14.0) == 0.0
    assert one.succeeded(at(14.0)) == []


def test_each_other_reason_is_reported_once() -> None:
    one = health()
    fail(one, GONE, 0.0, 2.0)
    assert fail(one, Failed(UNREACHABLE, "Connection reset"), 2.0, 2.1) == []
    [(_, text)] = fail(one, FULL, 3.0, 3.1)
    assert FULL.text in text
    assert fail(one, GONE, 4.0, 4.1) == []
    assert fail(one, FULL, 5.0, 5.1) == []
    assert len(fail(one, Failed(REFUSING, "etcdserver: no leader"), 6.0, 6.1)) == 1


def test_number_of_reported_reasons_is_bounded() -> None:
    one = health()
    said = [fail(one, Failed(REFUSING, f"reason {n}"), 0.0, 2.0 + n) for n in range(100)]
    assert sum(map(len, said)) < 20


def test_next_store_trouble_is_reported_again() -> None:
    one = health()
    fail(one, FULL, 0.0, 2.0)
    one.succeeded(at(3.0))
    assert fail(one, FULL, 4.0, 4.1) == []
    assert len(fail(one, FULL, 5.0, 6.0)) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Unavailable("txn", "e", "RESOURCE_EXHAUSTED: " + FULL.text), FULL),
        (Ambiguous("txn", "e", "RESOURCE_EXHAUSTED: " + FULL.text), FULL),
        (Unavailable("txn", "e", "UNAVAILABLE: etcdserver: no leader"),
         Failed(REFUSING, "etcdserver: no leader", StoreFailure.NO_LEADER)),
        (Unavailable("txn", "e", "DATA_LOSS: etcdserver: corrupt cluster"),
         Failed(REFUSING, "etcdserver: corrupt cluster", StoreFailure.CORRUPT)),
        (PermissionDenied("txn", "e", "PERMISSION_DENIED: etcdserver: permission denied"),
         Failed(REFUSING, "etcdserver: permission denied", StoreFailure.PERMISSION_DENIED)),
        (PermissionDenied("txn", "e", "PERMISSION_DENIED: not today"),
         Failed(REFUSING, "PERMISSION_DENIED: not today", StoreFailure.PERMISSION_DENIED)),
        (Unauthenticated("txn", "e", "INVALID_ARGUMENT: etcdserver: authentication failed"),
         Failed(REFUSING, "etcdserver: authentication failed", StoreFailure.UNAUTHENTICATED,
                costly=True)),
        (Unauthenticated("txn", "e", "INVALID_ARGUMENT: etcdserver: user name is empty"),
         Failed(REFUSING, "etcdserver: user name is empty", StoreFailure.NO_USER, costly=True)),
        (Unauthenticated("txn", "e", "UNAUTHENTICATED: etcdserver: unknown"),
         Failed(REFUSING, "etcdserver: unknown", StoreFailure.UNAUTHENTICATED, costly=True)),
        (Unavailable("txn", "e", "UNAVAILABLE: etcdserver: leader changed"),
         Failed(REFUSING, "etcdserver: leader changed")),
        (Unavailable("txn", "e", "DEADLINE_EXCEEDED: Deadline Exceeded"),
         Failed(UNREACHABLE, "no answer in time")),
        (Unavailable("txn", "e", "UNAVAILABLE: Connection refused"),
         Failed(UNREACHABLE, "UNAVAILABLE: Connection refused")),
        (NotEtcd("txn", "e", "UNIMPLEMENTED: "), Failed(UNREACHABLE, "UNIMPLEMENTED: ")),
    ],
)  # fmt: skip
def test_error_answer_of_etcd_is_a_refusal(error: EtcdError, expected: Failed) -> None:
    assert failure_of(error) == expected


def test_foreign_texts_are_one_bounded_line() -> None:
    assert bounded_line("a  b\nc") == "a b"
    assert len(bounded_line("x" * 10_000)) == LONGEST_TEXT
    assert len(endpoints_text(tuple(f"https://etcd-{n}:2379" for n in range(100)))) <= 120


def test_store_trouble_survives_json_and_invalid_values_are_none() -> None:
    trouble = StoreTrouble("etcd", REFUSING, "etcd:2379", FULL.text, 1000, StoreFailure.NO_SPACE)
    assert read_trouble(trouble.document()) == trouble
    long = {**trouble.document(), "text": "x" * 10_000, "sinceMs": 10**30}
    found = read_trouble(long)
    assert found is not None
    assert len(found.text) <= LONGEST_TEXT
    wrongs: tuple[object, ...] = None, [], "etcd", {}, {**trouble.document(), "state": "odd"}
    for wrong in wrongs:
        assert read_trouble(wrong) is None
    for bad in ("x", float("inf"), None):
        assert read_trouble({**trouble.document(), "sinceMs": bad}) is None


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        (REFUSING, FULL.text, StoreFailure.NO_SPACE),
        (REFUSING, "etcdserver: something else", StoreFailure.OTHER),
        (UNREACHABLE, "no leader", StoreFailure.OTHER),
    ],
)
def test_report_of_the_previous_release_has_the_reason_that_its_text_names(
    state: StoreState, text: str, expected: StoreFailure
) -> None:
    document = StoreTrouble("etcd", state, "etcd:2379", text, 1000).document()
    del document["reason"]
    assert read_trouble(document) == StoreTrouble("etcd", state, "etcd:2379", text, 1000, expected)


def test_reason_of_a_newer_release_is_other() -> None:
    document = StoreTrouble("etcd", REFUSING, "etcd:2379", FULL.text, 1000).document()
    found = read_trouble({**document, "reason": "SomethingNew"})
    assert found is not None
    assert found.reason is StoreFailure.OTHER
