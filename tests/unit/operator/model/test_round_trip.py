"""Round trip of any valid spec and any status through serialisation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_operator.model import (
    Backend,
    CleanPodPolicy,
    ConditionType,
    Phase,
    RendezvousState,
    ScaleUp,
    Status,
    WarmStart,
    parse_manifest,
)
from elasticjob_operator.model.types import MAX_NODES, MAX_SECONDS, ConditionStatus
from tests.unit.operator.builders import manifest

seconds = st.integers(0, MAX_SECONDS)
labels = st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def containers(draw: st.DrawFn) -> list[dict[str, Any]]:
    names = draw(st.lists(labels, min_size=1, max_size=4, unique=True))
    extra = st.dictionaries(st.sampled_from(["ports", "lifecycle", "tty"]), json_values, max_size=2)
    return [
        {
            **draw(extra),
            "name": name,
            "command": draw(st.lists(st.text(max_size=5), min_size=1, max_size=3)),
            "env": [{"name": "A", "value": draw(st.text(max_size=5))}],
        }
        for name in names
    ]


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(1, 1000))
    last_call = draw(st.integers(0, 1000))
    pods = draw(containers())
    backend = draw(st.sampled_from(list(Backend)))
    endpoints = draw(st.sampled_from([[], ["etcd:2379"]]))
    rendezvous: dict[str, Any] = {
        "backend": backend.value,
        "endpoints": endpoints,
        "lastCallSeconds": last_call,
        "joinTimeoutSeconds": max(1, last_call) + draw(st.integers(0, 1000)),
    }
    if endpoints and backend is not Backend.C10D:
        rendezvous["secretName"] = draw(labels)
    return {
        "minNodes": low,
        "maxNodes": low + draw(st.integers(0, 1000)),
        "nodes": draw(st.none() | st.integers(0, MAX_NODES)),
        "nodeIncrement": draw(st.integers(1, 2000)) if backend is Backend.ETCD else 1,
        "nprocPerNode": draw(st.sampled_from(["auto", "gpu", "cpu"]) | st.integers(1, 1024)),
        "trainer": draw(st.sampled_from([container["name"] for container in pods])),
        "rendezvous": rendezvous,
        "elasticity": {"scaleUp": draw(st.sampled_from(list(ScaleUp))).value},
        "recovery": {"warmStart": draw(st.sampled_from(list(WarmStart))).value},
        "runPolicy": {
            "suspend": draw(st.booleans()),
            "cleanPodPolicy": draw(st.sampled_from(list(CleanPodPolicy))).value,
            "ttlSecondsAfterFinished": draw(st.none() | seconds),
        },
        "template": {"spec": {"containers": pods, "volumes": draw(json_values)}},
    }


@given(specs())
@settings(max_examples=60, deadline=None)
def test_any_valid_spec_survives_dump_and_parse(spec: dict[str, Any]) -> None:
    job = parse_manifest(manifest(**spec))
    again = parse_manifest(job.manifest())
    assert again == job
    assert again.manifest() == job.manifest()
    written = job.manifest()["spec"]["template"]["spec"]
    assert written.get("volumes") == spec["template"]["spec"]["volumes"]


moments = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
optional_int = st.none() | st.integers(0, 10**6)


@st.composite
def statuses(draw: st.DrawFn) -> dict[str, Any]:
    member = st.fixed_dictionaries({"pod": labels, "state": labels, "rank": optional_int})
    history = st.fixed_dictionaries(
        {"round": st.integers(1, 99), "cause": labels, "nodes": st.integers(1, 9)},
        optional={"detect_ms": optional_int, "start_ms": optional_int},
    )
    condition = st.fixed_dictionaries(
        {
            "type": st.sampled_from(list(ConditionType)),
            "status": st.sampled_from(list(ConditionStatus)),
            "reason": labels,
            "last_transition_time": moments,
        }
    )
    failure = st.fixed_dictionaries(
        {"round": st.integers(1, 9), "pod": labels, "class_": labels, "traceback": st.text()}
    )
    view = st.fixed_dictionaries(
        {"state": st.sampled_from(list(RendezvousState)), "since": moments, "master": labels}
    )
    return {
        "phase": draw(st.sampled_from(list(Phase))),
        "rendezvous": draw(st.none() | view),
        "members": draw(st.lists(member, max_size=3)),
        "rounds": draw(st.lists(history, max_size=3)),
        "conditions": draw(st.lists(condition, max_size=3)),
        "first_failure": draw(st.none() | failure),
        "start_time": draw(st.none() | moments),
    }


@given(statuses())
@settings(max_examples=60, deadline=None)
def test_any_status_survives_dump_and_parse(fields: dict[str, Any]) -> None:
    status = Status.model_validate(fields)
    document = manifest()
    document["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert parse_manifest(document).status == status


def test_times_are_utc_in_whole_seconds() -> None:
    east = datetime(2026, 1, 31, 13, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=1)))
    dumped = Status(start_time=east).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert dumped["startTime"] == "2026-01-31T12:00:00Z"


def test_status_of_newer_operator_is_read() -> None:
    document = manifest()
    document["status"] = {"phase": "Running", "spares": 3, "rendezvous": {"state": "final", "x": 1}}
    assert parse_manifest(document).status.phase is Phase.RUNNING


def test_status_of_an_earlier_release_is_read() -> None:
    """It counted pods in one number, and knew no latest failure; a reason might be absent."""
    old = {
        "phase": "Running",
        "pods": 3,
        "readyNodes": 2,
        "firstFailure": {"round": 1, "pod": "job-0"},
        "members": [{"pod": "job-0", "state": "running", "node": "machine"}],
        "avoidedNodes": [{"until": "2026-01-01T00:00:00Z"}],
        "conditions": [
            {"type": "Running", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {
                "type": "Failed",
                "status": "False",
                "reason": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            },
        ],
    }
    status = Status.model_validate(old)
    assert (status.pods, status.ready_nodes, status.last_failure) == (None, 2, None)
    assert [one.reason for one in status.conditions] == ["Unknown", "Unknown"]
    assert [one.node for one in status.members] == ["machine"]
    assert status.avoided_nodes == [], "the API server drops the names under their former key"
