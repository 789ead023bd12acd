"""Exit barrier with a store that answers, one that does not, and a lost answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from elasticjob_agent.polling.poll import FIRST_DONE, done_note
from elasticjob_agent.polling.round_store import ExitBarrierClient
from tests.unit.agent.memory_rendezvous import MemoryStore

NUMBER, LAST = (
    f"torchelastic/agent/terminal_state/{name}" for name in ("num_members", "last_member")
)


class Kept:
    """Handler of a given backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_backend(self) -> str:
        return self.backend

    def gone(self) -> frozenset[int]:
        return frozenset()


class Flaky(MemoryStore):
    """Store that fails `failures` times and loses `lost` answers to `add`."""

    def __init__(self, failures: int = 0, lost: int = 0) -> None:
        super().__init__()
        self.failures, self.lost = failures, lost

    def set(self, key: str, value: str | bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        super().set(key, value)

    def add(self, key: str, amount: int) -> int:
        total = super().add(key, amount)
        if self.lost:
            self.lost -= 1
            raise ConnectionError("the answer is lost")
        return total


def barrier(store: MemoryStore, backend: str = "etcd-v2", away: float = 60.0, **more: Any) -> Any:
    meeting = more.get("meeting", lambda: True)
    return ExitBarrierClient(
        Kept(backend), store, [True, False], 0.01, away, meeting, retry_seconds=0.01
    )


def test_note_is_written_before_the_count() -> None:
    store = MemoryStore()
    assert asyncio.run(barrier(store).arrived()) == LAST
    assert store.keys() == {done_note(0), FIRST_DONE, NUMBER}


def test_unreachable_etcd_is_retried_and_counts_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Flaky(failures=3)
    assert asyncio.run(barrier(store).arrived()) == LAST
    assert store.get(NUMBER) == b"1"
    assert caplog.text.count("cannot notify the other nodes yet") == 1


def test_wait_for_unreachable_etcd_is_bounded() -> None:
    store = Flaky(failures=10_000)
    gate = barrier(store, away=0.05)
    with pytest.raises(ConnectionError) as caught:
        asyncio.run(gate.arrived())
    assert "etcd did not answer for 0 s (away)" in gate.unknown(caught.value)


def test_agent_no_longer_at_exit_barrier_stops_retrying() -> None:
    with pytest.raises(ConnectionError):
        asyncio.run(barrier(Flaky(failures=10_000), meeting=lambda: False).arrived())


def test_store_that_ends_with_its_node_is_not_waited_for() -> None:
    gate = barrier(Flaky(failures=1), "c10d")
    with pytest.raises(ConnectionError) as caught:
        asyncio.run(gate.arrived())
    assert gate.unknown(caught.value) == ""


def test_count_with_lost_answer_is_not_repeated() -> None:
    store = Flaky(lost=1)

    async def both() -> str:
        ours = asyncio.create_task(barrier(store).arrived())
        while not store.check([NUMBER]):
            await asyncio.sleep(0)
        assert not store.check([LAST])
        store.set(done_note(1), b"1")  # the other one, which has not counted yet
        return await ours

    assert asyncio.run(both()) == LAST
    assert store.get(NUMBER) == b"1"
    assert store.check([LAST]), "all have left their notes"
