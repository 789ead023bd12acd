"""Job's end as read from the last rounds' stores by a node without a place."""

from __future__ import annotations

import asyncio

import pytest

from elasticjob_agent.polling.join import read_outcome
from elasticjob_agent.polling.poll import ENDED_NOTE
from elasticjob_agent.polling.round_store import TERMINAL_STATE_SYNC_ID, last_member
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from tests.unit.agent.memory_rendezvous import MemoryStore

DONE = last_member(TERMINAL_STATE_SYNC_ID)
SUCCESS = Outcome(OutcomeKind.SUCCEEDED)
FAILURE = Outcome(OutcomeKind.FAILED, "said")


class Handler:
    def __init__(self, *stores: MemoryStore) -> None:
        self._stores = list(stores)

    def last_stores(self) -> list[MemoryStore]:
        return self._stores


class Away:
    def last_stores(self) -> list[MemoryStore]:
        raise ConnectionError("the store is gone")


def store(*keys: str) -> MemoryStore:
    made = MemoryStore()
    for key in keys:
        made.set(key, "said")
    return made


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (Handler(store(DONE), store()), SUCCESS),
        (Handler(store(), store(DONE)), SUCCESS),
        (Handler(store(ENDED_NOTE)), FAILURE),
        (Handler(store(), store(ENDED_NOTE)), FAILURE),
        (Handler(store(DONE), store(ENDED_NOTE)), FAILURE),
        (Handler(store()), None),
        (Handler(), None),
        (Away(), None),
        (object(), None),
    ],
)
def test_job_outcome_from_handler(handler: object, expected: Outcome | None) -> None:
    assert asyncio.run(read_outcome(handler, None)) == expected
