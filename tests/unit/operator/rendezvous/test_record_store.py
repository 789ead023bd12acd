"""Quota of a job's records: keys, bytes and writes counted, dropped when exceeded, others kept."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.rendezvous.record_store import (
    UNKNOWN_NODES,
    WRITE_BYTES,
    RecordStore,
    quota_of,
)
from elasticjob_rendezvous.protocol.kv import KeyValue
from elasticjob_rendezvous.protocol.records.keys import job_folder, job_prefix

FOLDER = job_folder("ns", "bad")
BAD, AGAIN, GOOD = job_prefix("ns", "bad", 1), job_prefix("ns", "bad", 2), job_prefix("ns", "ok", 1)


def record(prefix: str, name: int, size: int = 1) -> KeyValue:
    return KeyValue(f"{prefix}{name}", b"x" * size, 1, 1)


def fill(store: RecordStore, prefix: str, count: int, size: int = 1) -> list[bool]:
    return [store.put(prefix, record(prefix, name, size)) for name in range(count)]


def kept(store: RecordStore, prefixes: Iterable[str] = (BAD, AGAIN, GOOD)) -> list[int]:
    return [len(store.jobs.get(prefix, {})) for prefix in prefixes]


def test_records_within_the_quota_are_kept() -> None:
    store, most = RecordStore(), quota_of(UNKNOWN_NODES).keys
    assert all(fill(store, BAD, most))
    assert kept(store) == [most, 0, 0]
    assert store.has(BAD)
    assert store.exceeded(FOLDER) is None


def test_one_key_too_many_drops_all_incarnations_of_the_job_and_no_other_job() -> None:
    store, most = RecordStore(), quota_of(UNKNOWN_NODES).keys
    fill(store, GOOD, 7)
    fill(store, AGAIN, 5)
    assert fill(store, BAD, most - 4).count(False) == 1
    assert kept(store) == [0, 0, 7]
    assert store.exceeded(FOLDER) == quota_of(UNKNOWN_NODES)
    assert store.newest("ns", "bad") is None
    assert not store.has(BAD)
    assert store.has(GOOD)


def test_too_many_bytes_drop_the_job() -> None:
    store, quota = RecordStore(), quota_of(UNKNOWN_NODES)
    assert store.put(BAD, record(BAD, 1, quota.bytes - 100))
    assert store.put(BAD, record(BAD, 1, quota.bytes - 50)), "the same key is counted once"
    assert not store.put(BAD, record(BAD, 2, 60))
    assert store.exceeded(FOLDER) is not None


def test_deleted_records_are_not_counted() -> None:
    store, most = RecordStore(), quota_of(UNKNOWN_NODES).keys
    for name in range(3 * most):
        assert store.put(BAD, record(BAD, name, 1000))
        store.delete(BAD, f"{BAD}{name}")
    assert kept(store) == [0, 0, 0]
    assert store.uids() == ()


def test_larger_job_is_read_again_under_its_larger_quota() -> None:
    store, nodes = RecordStore(), 4 * UNKNOWN_NODES
    count = quota_of(UNKNOWN_NODES).keys + 1
    fill(store, BAD, count)
    assert store.allow(FOLDER, nodes)
    assert store.exceeded(FOLDER) is None
    assert not store.has(BAD), "until it is read again"
    again = store.emptied()
    assert all(fill(again, BAD, count))
    assert again.has(BAD)
    assert not again.allow(FOLDER, 1), "a job that shrinks keeps its records for a while"
    assert again.has(BAD)


def test_forgotten_job_counts_from_zero() -> None:
    store = RecordStore()
    fill(store, BAD, quota_of(UNKNOWN_NODES).keys + 1)
    store.forget(FOLDER)
    assert store.has(BAD)
    assert all(fill(store, BAD, 10))


QUOTA = quota_of(UNKNOWN_NODES)
EACH = (1 << 20) - WRITE_BYTES


def write(store: RecordStore, prefix: str, now: float, most: int = 10_000) -> int:
    """Write 1 MiB each until refused; return the number of writes that were allowed."""
    return next(count for count in range(most) if not store.wrote(prefix, EACH, now))


def test_job_that_overwrites_its_records_too_fast_is_dropped_alone() -> None:
    store = RecordStore()
    fill(store, BAD, 3)
    fill(store, GOOD, 3)
    assert write(store, BAD, 0.0) == QUOTA.burst >> 20
    assert not store.has(BAD)
    assert kept(store) == [0, 0, 3]
    assert store.exceeded(FOLDER) == QUOTA
    assert store.wrote(GOOD, EACH, 0.0)


def test_writes_at_the_allowed_rate_go_on() -> None:
    store, seconds = RecordStore(), (1 << 20) / QUOTA.rate
    fill(store, BAD, 1)
    write(store, AGAIN, 0.0)
    store = store.emptied()
    assert all(store.wrote(BAD, EACH, (number + 1) * seconds) for number in range(100))
    assert not store.wrote(BAD, EACH, 100.5 * seconds)


def test_deleting_the_records_or_reading_them_again_allows_no_further_writes() -> None:
    store = RecordStore()
    fill(store, BAD, 1)
    for _ in range(QUOTA.burst >> 20):
        assert store.wrote(BAD, EACH, 0.0)
    store.delete(BAD, f"{BAD}0")
    assert kept(store) == [0, 0, 0]
    assert not store.emptied().wrote(BAD, EACH, 0.0)


def test_larger_job_may_write_more_and_a_forgotten_one_begins_anew() -> None:
    store, nodes = RecordStore(), 4 * UNKNOWN_NODES
    store.allow(FOLDER, nodes)
    assert write(store, BAD, 0.0) == quota_of(nodes).burst >> 20
    store.forget(FOLDER)
    assert store.has(BAD)
    assert write(store, BAD, 0.0) == QUOTA.burst >> 20


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 50)), max_size=60))
def test_usage_equals_the_records_that_are_kept(steps: list[tuple[bool, int, int]]) -> None:
    store, kept_sizes = RecordStore(), {}
    for puts, name, size in steps:
        if puts:
            store.put(BAD, record(BAD, name, size))
            kept_sizes[name] = size
        else:
            store.delete(BAD, f"{BAD}{name}")
            kept_sizes.pop(name, None)
    held = {key.removeprefix(BAD): len(kv.value) for key, kv in store.jobs.get(BAD, {}).items()}
    assert held == {str(name): size for name, size in kept_sizes.items()}
    room = quota_of(UNKNOWN_NODES).keys - len(kept_sizes)
    assert all(store.put(BAD, record(BAD, 100 + name)) for name in range(room))
    assert not store.put(BAD, record(BAD, 99))
