"""Notes that ranks leave in the store once they make no further call, and calls after an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elasticjob.train import SnapshotError
from elasticjob.train.snapshots.core.exchange import SAME_CALLS, End, Exchange
from elasticjob.train.snapshots.ranks import torch_group
from elasticjob.train.snapshots.ranks.gang import Gang
from tests.unit.train.waiting import PATIENCE_SECONDS, until


class Store:
    """Store that records its requests, and answers none while `answers` is not set."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.requests: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    def _answer(self, request: str) -> None:
        self.requests.append(request)
        assert self.answers.wait(PATIENCE_SECONDS), "no answer of the store"

    def set(self, key: str, text: str) -> None:
        self._answer("set")
        self.values[key] = text.encode()

    def get(self, key: str) -> bytes:
        self._answer("get")
        found: bytes = self.values[key]
        return found

    def add(self, key: str, count: int) -> None:
        self._answer("add")
        self.values[key] = self.values.get(key, 0) + count

    def check(self, keys: list[str]) -> bool:
        self._answer("check")
        return all(key in self.values for key in keys)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    found = Store()
    monkeypatch.setattr(torch_group, "default_store", lambda: found)
    monkeypatch.setattr(torch_group, "store_requests", torch_group.Requests())
    torch_group.store_requests.start()
    monkeypatch.setattr(torch_group, "STORE_SECONDS", PATIENCE_SECONDS)
    yield found
    found.answers.set()


def rank_of(rank: int, size: int = 2) -> Gang:
    found = Gang()
    found.rank, found.size = rank, size
    found.begins(7)
    return found


def saving(rank: int, size: int = 2) -> Gang:
    """Return a rank in its first save."""
    found = rank_of(rank, size)
    found.saves(2)
    return found


def test_end_does_not_wait_for_a_store_without_an_answer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_group, "STORE_SECONDS", 0.01)
    store.answers.clear()
    rank_of(0).ends(End.CLOSE)
    rank_of(0).ends(End.CLOSE)
    assert not store.values
    store.answers.set()
    until(lambda: store.requests == ["set", "add"] * 2)


def test_end_of_the_process_starts_no_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer interpreters cannot start one then."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading, "Thread", refuse)
    rank_of(0).ends(End.PROCESS)
    assert saving(1)._ended(is_lost=False) == (0, End.PROCESS)


@pytest.mark.parametrize("error", [ImportError, KeyError, AttributeError, RuntimeError])
def test_end_without_a_store_is_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail() -> Store:
        raise error

    monkeypatch.setattr(torch_group, "default_store", fail)
    rank_of(0).ends(End.CLOSE)
    assert saving(1)._ended(is_lost=True) is None
    monkeypatch.setattr(torch_group, "default_store", lambda: store)
    rank_of(0).ends(End.CLOSE)
    assert saving(1)._ended(is_lost=True) == (0, End.CLOSE)


def test_second_read_of_the_notes_waits_for_the_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_group, "STORE_SECONDS", 0.01)
    store.answers.clear()
    waiting = saving(1)
    assert waiting._ended(is_lost=False) is None
    until(lambda: store.requests == ["check"])
    assert waiting._ended(is_lost=False) is None
    store.answers.set()
    until(lambda: not torch_group.store_requests.is_busy)
    assert store.requests == ["check"]


def test_fault_without_a_note_takes_one_request_of_each_rank(store: Store) -> None:
    assert saving(1, size=1000)._ended(is_lost=True) is None
    assert store.requests == ["check"]
    rank_of(900, size=1000).ends(End.CLOSE)
    assert saving(1, size=1000)._ended(is_lost=True) == (900, End.CLOSE)


class Work:
    """Collective that fails, or does not end."""

    def __init__(self, is_completed: bool) -> None:
        self._is_completed = is_completed

    def wait(self, *_: object) -> None:
        raise RuntimeError("gloo: no end")

    def is_completed(self) -> bool:
        return self._is_completed


@pytest.mark.parametrize(
    ("end", "done", "remedy"),
    [
        (End.CLOSE, "called close()", SAME_CALLS),
        (End.PROCESS, "ended its process", "see the output of rank 0"),
    ],
)
def test_error_of_a_wait_has_the_end_of_the_other_rank(
    store: Store, end: End, done: str, remedy: str
) -> None:
    """A process that has called `sys.exit` may have had an error: its calls are not the cause."""
    rank_of(0).ends(end)
    waiting = saving(1)
    for work in (Work(True), Work(False)):
        with pytest.raises(SnapshotError) as raised:
            waiting._wait(work)
        text = f"rank 0 has {done}, and rank 1 has called save() of step 2: {remedy}"
        assert str(raised.value).startswith(text)
        assert (SAME_CALLS in str(raised.value)) == (remedy == SAME_CALLS)


def test_lost_connection_is_not_due_to_a_rank_that_made_the_same_calls(store: Store) -> None:
    """As after the last save of all ranks, of which one dies and another one has gone on."""
    saving(0).ends(End.CLOSE)
    assert saving(1)._ended(is_lost=True) is None
    behind = saving(1)
    behind.saves(3)
    assert behind._ended(is_lost=True) == (0, End.CLOSE)


def test_call_after_an_exchange_that_did_not_end_is_an_error_at_once(store: Store) -> None:
    """It would receive the records of that exchange."""
    rank_of(0).ends(End.CLOSE)
    waiting = saving(1)
    with pytest.raises(SnapshotError):
        waiting._wait(Work(False))
    text = r"rank 1 has called save\(\) of step 3, .* in save\(\) of step 2 did not end: restart"
    waiting.saves(3)
    with pytest.raises(SnapshotError, match=text):
        waiting.gather(Exchange.HOLD, b"")
