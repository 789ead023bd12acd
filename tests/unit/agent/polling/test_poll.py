"""Agent's interpretation of a handler's answers and the notes in a round's store."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elasticjob_agent.polling.poll import FAILED_NOTE, FIRST_DONE, LEFT_NOTE, done_note, poll_round
from tests.unit.agent.memory_rendezvous import MemoryStore

MET_AT = "all/met"


@dataclass
class Torchs:
    """Handler with torch's limited interface."""

    waiting: int = 0
    closed: bool = False
    backend: str = "etcd-v2"

    def get_backend(self) -> str:
        return self.backend

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def is_closed(self) -> bool:
        return self.closed


@dataclass
class Ours(Torchs):
    missed: frozenset[int] = frozenset()
    newer: bool = False

    def gone(self) -> frozenset[int]:
        return self.missed

    def lost(self) -> bool:
        return bool(self.missed)

    def moved_on(self) -> bool:
        return self.newer


def store(*keys: str) -> MemoryStore:
    made = MemoryStore()
    for key in keys:
        made.set(key, "said")
    return made


DONE = (FIRST_DONE, done_note(1))


@pytest.mark.parametrize(
    ("handler", "notes", "waiting"),
    [
        (Ours(1), (), 1),
        (Ours(1, missed=frozenset({1})), (), 1),
        (Ours(1, missed=frozenset({1})), DONE, 0),  # it was done, and was killed
        (Ours(1), DONE, 0),  # a newcomer
        (Ours(2, missed=frozenset({1, 2})), DONE, 2),  # another was not done
        (Ours(1, newer=True), DONE, 1),  # a member of the round wants a newer one
        (Ours(1), (*DONE, FAILED_NOTE), 1),
        (Torchs(1), DONE, 1),  # it could not report those two
        (Ours(0), (LEFT_NOTE,), 1),  # its key lives on for seconds
        (Ours(0), (LEFT_NOTE, *DONE), 0),
        (Ours(0, closed=True), (LEFT_NOTE,), 0),
        (Ours(0, backend="c10d"), (LEFT_NOTE,), 0),  # there it is removed from all lists
        (Torchs(0), (LEFT_NOTE,), 0),
    ],
)
def test_waiting_nodes_are_counted(handler: Torchs, notes: tuple[str, ...], waiting: int) -> None:
    seen = poll_round(handler, store(*notes), "", 3)
    assert seen.waiting == waiting
    assert bool(seen.left) == (waiting > 0 and LEFT_NOTE in notes)


@pytest.mark.parametrize(
    ("missed", "notes", "met"),
    [
        ((), (MET_AT,), True),
        ((), (done_note(0), done_note(1)), False),  # all are about to be counted
        ((1,), (done_note(0), done_note(1)), True),  # one was killed before it was
        ((1,), (done_note(0),), False),
    ],
)
def test_exit_barrier_is_complete_when_all_are_done(
    missed: tuple[int, ...], notes: tuple[str, ...], met: bool
) -> None:
    handler = Ours(int(bool(missed)), missed=frozenset(missed))
    kept = store(FIRST_DONE, *notes)
    assert poll_round(handler, kept, MET_AT, 2).met is met
    assert kept.check([MET_AT]) is met, "who was not in the round finds that alone"
