"""Recovery benchmark in pods: evaluation of workers' records and of the status."""

from __future__ import annotations

import json

import pytest

from bench.pods.api import Lives
from bench.pods.runs import Fault, Runs
from bench.pods.seen import First, Life, Outcome, firsts, join, pause, recovery, together
from tests.e2e.api import Api


def first(pod: str, number: int, rank: int, world: int, at: float = 10.0, **more: float) -> First:
    return First(
        pod=pod, round=number, rank=rank, world=world, pid=7, at=at,
        launched=more.get("launched", 1.0), began=at - 0.1, before=more.get("before"),
    )  # fmt: skip


def test_first_steps_are_found_with_and_without_launcher_prefix() -> None:
    said = {
        "round": 2, "rank": 0, "world": 4, "pid": 9,
        "launched": 1.5, "began": 9.0, "at": 9.5, "before": None,
    }  # fmt: skip
    log = f"[0] first {json.dumps(said)}\nfirst {json.dumps(said)}\nfirst of all\n"
    assert firsts("a", log) == [First("a", 2, 0, 4, 9, 1.5, 9.0, 9.5, None)] * 2


def test_earliest_complete_round_of_exactly_these_pods_counts() -> None:
    told = [
        first("a", 1, 0, 2), first("b", 1, 1, 2),  # the previous round
        first("a", 2, 0, 3), first("b", 2, 1, 3),  # of three, one without a record
        first("b", 3, 0, 2), first("a", 3, 1, 2),
        first("a", 4, 0, 2), first("b", 4, 1, 2),
    ]  # fmt: skip
    found = together(told, 1, ["a", "b"])
    assert found is not None
    assert [(each.pod, each.round) for each in found] == [("b", 3), ("a", 3)]
    assert together(told, 4, ["a", "b"]) is None
    assert together(told, 1, ["a"]) is None
    assert together(told, 1, ["a", "b", "c"]) is None


def test_ranks_must_be_a_bijection() -> None:
    assert together([first("a", 2, 0, 2), first("b", 2, 0, 2)], 1, ["a", "b"]) is None


def test_pause_lasts_from_last_step_of_any_pod_to_first_step_of_all() -> None:
    found = [first("a", 2, 0, 2, at=10.0, before=9.0), first("b", 2, 1, 2, at=10.4, before=9.1)]
    assert pause(found) == pytest.approx(1.3)
    assert pause([first("a", 2, 0, 1)]) is None


def test_recovery_parts_add_up_to_the_recovery() -> None:
    found = [first("a", 2, 0, 1, at=10.0, before=9.0)]
    outcome = recovery(found, 8.0, {"detectMs": 100, "stopMs": 200, "coldNodes": 1})
    assert outcome.seconds == pytest.approx(2.0)
    assert sum(outcome.parts.values()) == pytest.approx(2.0)
    assert outcome.parts["rest"] == pytest.approx(1.7)
    assert (outcome.parts["stop"], outcome.parts["confirm"]) == (0.2, 0.0)
    assert outcome.cold == 1


def test_join_is_divided_into_operator_kubernetes_and_pod_parts() -> None:
    found = [
        first("a", 2, 0, 2, at=20.0, before=19.5),
        first("b", 2, 1, 2, at=20.1, launched=14.0),
    ]
    life = Life({"created": 10.2, "scheduled": 10.3})
    outcome = join(found, 10.0, {"startMs": 40}, "b", life)
    assert outcome.seconds == pytest.approx(10.1)
    assert outcome.pause == pytest.approx(0.6)
    parts = {name: round(value, 2) for name, value in outcome.parts.items() if value}
    assert parts == {
        "create": 0.2, "schedule": 0.1, "containers": 3.7, "prepare": 5.5, "pause": 0.6,
        "pause: start": 0.04,
    }  # fmt: skip
    assert sum(list(outcome.parts.values())[:5]) == pytest.approx(10.1)


def test_pod_times_are_of_first_observation() -> None:
    lives = Lives(Api("nowhere"), "default")
    pod = {"metadata": {"uid": "u"}, "spec": {}}
    lives.take(1.0, pod)
    lives.take(2.0, pod | {"spec": {"nodeName": "one"}})
    lives.take(3.0, pod | {"spec": {"nodeName": "one"}})
    assert lives.of("u").seen == {"created": 1.0, "scheduled": 2.0}
    assert lives.of("other").seen == {}


def test_table_has_medians_and_failures() -> None:
    runs = Runs(4)
    runs.outcomes[Fault.WORKER_KILLED] = [
        Outcome(0.4, 0.3, {"rest": 0.1, "stop": 0.2}, load=2.0),
        Outcome(0.8, 0.5, {"rest": 0.3, "stop": 0.4}, load=4.0),
        Outcome.failed("never came"),
    ]
    (_, _, row) = runs.table().splitlines()
    assert row == (
        "| worker-killed | 2, 1 failed | 0.60 (0.40 to 0.80) | 0.40 | rest 0.20, stop 0.30 | 3 |"
    )
    assert runs.errors() == ["never came"]
    assert json.loads(json.dumps(runs.to_json()))[0]["parts"] == pytest.approx(
        {"rest": 0.2, "stop": 0.3}
    )
