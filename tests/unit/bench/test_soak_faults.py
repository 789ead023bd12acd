"""Soak: the verdict on a job's status, and the faults that it draws."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from bench.soak.disturbances import (
    ON_A_CLUSTER,
    ON_THIS_MACHINE,
    UNSEEN,
    Disturbance,
    Failure,
    JobState,
    Kind,
    Round,
    disturbance,
    job_state,
    judged,
)

OLD = Failure(2, "job-0", "UserError")
BEFORE = JobState(
    4, 1, ("job-0", "job-1"), (Round(4, "start", ()),), OLD, {"losses": 3, "joins": 2}
)
KILLED, LOST = Failure(4, "job-1", "Signal"), Failure(4, "job-1", "NodeLost")
COUNTS = {"loss": "losses", "leave": "leaves", "preemption": "preemptions", "join": "joins"}
SAID = {
    "failure": "a worker of job-1 failed",
    "loss": "job-1 was lost",
    "leave": "job-1 left",
    "preemption": "job-1's node was drained",
}


def after(
    *rounds: tuple[str, str],
    restarts: int = 1,
    failure: Failure | None = OLD,
    counts: Mapping[str, int] | None = None,
    said: str | None = None,
) -> JobState:
    """Return the status after these rounds: correct except for the test's changes."""
    new = [Round(5 + n, kind, (name,) if name else ()) for n, (kind, name) in enumerate(rounds)]
    counted = Counter(BEFORE.counts)
    counted.update(COUNTS[each.kind] for each in new if each.kind in COUNTS)
    first = new[0].kind if new else ""
    explained = f"Last interruption: {said or SAID.get(first, '')}, recovered in 0.1 s."
    return JobState(
        4 + len(new),
        restarts,
        BEFORE.running,
        (*BEFORE.rounds, *new),
        failure,
        counted if counts is None else counts,
        ("Training on all 2 nodes.", explained),
    )


@pytest.mark.parametrize(
    ("kind", "job_state", "wrong"),
    [
        (Kind.KILL_WORKER, after(("failure", "job-1"), restarts=2, failure=KILLED), ""),
        (Kind.KILL_WORKER, after(("failure", "job-0"), restarts=2), "job-0 was named"),
        (Kind.KILL_WORKER, after(("failure", "job-1")), "restarts went from 1 to 1"),
        (
            Kind.KILL_WORKER,
            after(("failure", "job-1"), restarts=2, failure=None),
            "the first failure is None",
        ),
        (Kind.KILL_NODE, after(("loss", "job-1"), ("join", "job-2"), failure=LOST), ""),
        (Kind.KILL_NODE, after(("loss", "job-1"), restarts=2), "restarts went from 1 to 2"),
        (Kind.KILL_NODE, after(("leave", "job-1")), "the cause was leave, not loss"),
        (Kind.KILL_NODE, after(("loss", "job-1"), ("loss", "job-0")), "then came loss"),
        (
            Kind.KILL_NODE,
            after(("loss", "job-1"), failure=LOST, counts={"losses": 5, "joins": 2}),
            "{'losses': 1} were counted as {'losses': 2}",
        ),
        (
            Kind.KILL_NODE,
            after(("loss", "job-1"), failure=LOST, said="job-10 was lost"),
            "it was explained as Training on all 2 nodes."
            " Last interruption: job-10 was lost, recovered in 0.1 s.",
        ),
        (Kind.DRAIN, after(("leave", "job-1")), ""),
        (Kind.DRAIN, after(), "there was no round"),
        (Kind.KILL_AGENT, after(), ""),
        (Kind.KILL_AGENT, after(("loss", "job-1")), "there were rounds: loss"),
        (Kind.KILL_OPERATOR, after(), ""),
    ],
)
def test_job_status_is_checked_against_disturbance(
    kind: Kind, job_state: JobState, wrong: str
) -> None:
    assert judged(Disturbance(kind, "job-1"), BEFORE, job_state) == wrong


def test_eviction_is_a_preemption() -> None:
    drain, evicted = Disturbance(Kind.DRAIN, "job-1"), after(("preemption", "job-1"))
    assert judged(drain, BEFORE, evicted, evicts=True) == ""
    assert judged(drain, BEFORE, evicted) == "the cause was preemption, not leave"


def test_more_nodes_are_a_join_and_fewer_are_a_leave() -> None:
    grown, shrunk = after(("join", "job-2")), after(("leave", "job-1"))
    assert judged(Disturbance(Kind.SCALE, nodes=3), BEFORE, grown) == ""
    assert judged(Disturbance(Kind.SCALE, nodes=1), BEFORE, shrunk) == ""
    assert judged(Disturbance(Kind.SCALE, nodes=1), BEFORE, grown) == (
        "the cause was join, not leave"
    )


def test_job_status_is_read() -> None:
    status = {
        "rendezvous": {"state": "final", "round": 5, "nodes": 1},
        "members": [
            {"pod": "job-0", "state": "running", "round": 5},
            {"pod": "job-1", "state": "waiting", "round": 4},
        ],
        "restarts": 2,
        "lastFailure": {"round": 4, "pod": "job-1", "class": "NodeLost", "message": ""},
        "interruptions": {"losses": 1},
        "explanation": ["Training."],
    }
    rounds = (Round(5, "loss", ("job-1",)),)
    assert job_state(status, [{"round": 5, "cause": "loss", "members": ["job-1"]}]) == JobState(
        5, 2, ("job-0",), rounds, LOST, {"losses": 1}, ("Training.",)
    )
    assert job_state({}, []) == JobState(0, 0, (), ())


@pytest.mark.parametrize("weights", [ON_THIS_MACHINE, ON_A_CLUSTER])
def test_schedule_contains_every_fault_and_depends_on_the_seed(weights: Mapping[Kind, int]) -> None:
    def drawn() -> list[Disturbance]:
        chance = random.Random(3)
        return [disturbance(chance, weights, 3, BEFORE) for _ in range(200)]

    assert drawn() == drawn()
    kinds = Counter(each.kind for each in drawn())
    assert set(kinds) == set(weights)
    assert all(each.nodes != 3 for each in drawn() if each.kind is Kind.SCALE)
    on_pods = [each for each in drawn() if each.pod]
    assert {each.pod for each in on_pods} == set(BEFORE.running)
    unseen = {each.kind for each in drawn() if each.unseen}
    assert unseen == (UNSEEN if Kind.KILL_OPERATOR in weights else set())
