"""What the soak says of a job: its judge, and the faults that it draws."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bench.disturbances import Disturbance, Kind, Round, Told, disturbance, judged

BEFORE = Told(4, 1, ("job-0", "job-1"), (Round(4, "start", ()),))


def after(*rounds: tuple[str, str], restarts: int = 1) -> Told:
    new = [Round(5 + n, kind, (name,) if name else ()) for n, (kind, name) in enumerate(rounds)]
    return Told(4 + len(new), restarts, BEFORE.running, (*BEFORE.rounds, *new))


@pytest.mark.parametrize(
    ("kind", "told", "wrong"),
    [
        (Kind.KILL_WORKER, after(("failure", "job-1"), restarts=2), ""),
        (Kind.KILL_WORKER, after(("failure", "job-0"), restarts=2), "job-0 was named"),
        (Kind.KILL_WORKER, after(("failure", "job-1")), "restarts went from 1 to 1"),
        (Kind.KILL_NODE, after(("loss", "job-1"), ("join", "job-2")), ""),
        (Kind.KILL_NODE, after(("loss", "job-1"), restarts=2), "restarts went from 1 to 2"),
        (Kind.KILL_NODE, after(("leave", "job-1")), "the cause was leave"),
        (Kind.KILL_NODE, after(("loss", "job-1"), ("loss", "job-0")), "then came loss"),
        (Kind.DRAIN, after(("leave", "job-1")), ""),
        (Kind.DRAIN, after(), "there was no round"),
        (Kind.KILL_AGENT, after(), ""),
        (Kind.KILL_AGENT, after(("loss", "job-1")), "there were rounds: loss"),
    ],
)
def test_what_a_job_says_is_judged(kind: Kind, told: Told, wrong: str) -> None:
    assert judged(Disturbance(kind, "job-1"), BEFORE, told) == wrong


def test_every_kind_of_fault_comes_and_a_seed_names_them() -> None:
    def drawn() -> list[Disturbance]:
        chance = random.Random(3)
        return [disturbance(chance, 3, BEFORE) for _ in range(200)]

    assert drawn() == drawn()
    kinds = Counter(each.kind for each in drawn())
    assert set(kinds) == set(Kind)
    assert all(each.nodes != 3 for each in drawn() if each.kind is Kind.SCALE)
