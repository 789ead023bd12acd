"""Statuses that another release wrote, or a client damaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_operator.model import (
    ConditionType,
    InvalidManifest,
    Phase,
    Problem,
    RendezvousState,
    Status,
    parse_manifest,
)
from elasticjob_operator.model.status import MAX_MEMBERS
from tests.unit.operator.builders import manifest
from tests.unit.operator.model.test_round_trip import json_values, statuses

AT = "2026-01-01T00:00:00Z"
Json = dict[str, Any]


def read(status: Any) -> tuple[Status, list[str]]:
    """Return the status of a job with this one, and the problems of the parts left out."""
    ignored: list[Problem] = []
    job = parse_manifest({**manifest(), "status": status}, ignored)
    return job.status, [str(problem) for problem in ignored]


def condition(kind: str, status: str = "True", reason: Any = "Known") -> Json:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": AT}


def test_fault_that_hides_others_costs_its_field_alone() -> None:
    nameless = [{"until": AT}] * 10
    ended = {"phase": "Succeeded", "completionTime": AT, "restarts": 2}
    status, _ = read({**ended, "avoidedNodes": [*nameless, {"nodeName": "a", "until": "soon"}]})
    assert (status.phase, status.restarts, status.avoided_nodes) == (Phase.SUCCEEDED, 2, [])


def test_unknown_values_are_left_out_and_the_rest_is_read() -> None:
    status, ignored = read(
        {
            "phase": "Paused",
            "restarts": 2,
            "launch": {"mode": "PerRack", "reason": "Requested"},
            "rendezvous": {"state": "melting", "round": 3},
            "snapshots": {"replicas": "Odd", "lostSteps": 4},
            "conditions": [
                condition("QuotaLow"),
                condition("Running"),
                condition("Ready", "Maybe"),
                condition("Resizing", reason=7),
            ],
        }
    )
    assert (status.phase, status.restarts, status.launch) == (Phase.RUNNING, 2, None)
    assert status.rendezvous is not None
    assert status.snapshots is not None
    assert (status.rendezvous.state, status.rendezvous.round) == (RendezvousState.UNKNOWN, 3)
    assert (status.snapshots.replicas, status.snapshots.lost_steps) == ("NotUsed", 4)
    assert [(one.type, one.reason) for one in status.conditions] == [
        (ConditionType.RUNNING, "Known"),
        (ConditionType.RESIZING, "Unknown"),
    ]
    assert [text.partition(": ")[0] for text in ignored] == [
        "status.phase",
        "status.launch.mode",
        "status.rendezvous.state",
        "status.snapshots.replicas",
        "status.conditions[0].type",
        "status.conditions[2].status",
        "status.conditions[3].reason",
    ]
    assert ignored[0].endswith("got 'Paused'")


@pytest.mark.parametrize(
    ("others", "phase"),
    [
        ({}, Phase.PENDING),
        ({"conditions": [condition("Running", "False")]}, Phase.PENDING),
        ({"conditions": [condition("Restarting")]}, Phase.RESTARTING),
        ({"conditions": [condition("Suspended")]}, Phase.SUSPENDED),
        ({"conditions": [condition("Succeeded"), condition("Finished")]}, Phase.SUCCEEDED),
        ({"conditions": [condition("Failed"), condition("Finished")]}, Phase.FAILED),
        ({"conditions": [condition("Finished"), condition("Cancelled")]}, Phase.FAILED),
        ({"completionTime": AT}, Phase.FAILED),
    ],
)
def test_unknown_phase_follows_from_the_conditions(others: Json, phase: Phase) -> None:
    """In particular a job that has ended does not run again, and none counts as new."""
    assert read({"phase": "Cancelled", **others})[0].phase is phase


@pytest.mark.parametrize("damage", [7, "x", True, []])
def test_status_of_a_wrong_type_is_empty(damage: Any) -> None:
    status, [ignored] = read(damage)
    assert status == Status()
    assert ignored.startswith("status: must be a mapping")


def test_list_beyond_its_bound_is_left_out() -> None:
    member = {"pod": "job-0", "state": "running"}
    status, [ignored] = read({"nodes": 2, "members": [member] * (MAX_MEMBERS + 1)})
    assert (status.nodes, status.members) == (2, [])
    assert ignored == "status.members: must hold at most 100 entries"


def test_problems_of_the_spec_are_refused_beside_those_of_the_status() -> None:
    document = {**manifest(maxNodes="x"), "status": {"phase": "Paused"}}
    with pytest.raises(InvalidManifest, match=r"spec\.maxNodes") as refused:
        parse_manifest(document)
    assert "status" not in str(refused.value)


@given(statuses(), st.data())
@settings(max_examples=100, deadline=None)
def test_any_damage_of_any_status_is_read(fields: Json, data: st.DataObject) -> None:
    document = Status.model_validate(fields).model_dump(mode="json", by_alias=True)
    for _ in range(data.draw(st.integers(1, 3))):
        holder: Any = document
        while True:
            step = data.draw(
                st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
            )
            if not isinstance(holder[step], dict | list) or not holder[step]:
                break
            if data.draw(st.booleans()):
                break
            holder = holder[step]
        holder[step] = data.draw(json_values)
    before = copy.deepcopy(document)
    status, _ = read(document)
    assert document == before, "the object of the caller stays"
    again = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert read(again) == (status, [])
