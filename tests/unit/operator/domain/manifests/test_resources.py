"""Quantities and quality-of-service classes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.resources import (
    is_guaranteed,
    pod_level,
    quantity,
    refuses_added_resources,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", "0"),
        ("2", "2"),
        (2, "2"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("500m", "0.5"),
        ("100u", "0.0001"),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("1.5Gi", "1610612736"),
        ("128e6", "128000000"),
        ("1E", "1000000000000000000"),
        ("+1", "1"),
    ],
)
def test_quantity_is_read(text: object, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "half", "1 Gi", "1gi", "1Kii", None, "m", "$(CPU)"])
def test_other_text_is_no_quantity(text: object) -> None:
    assert quantity(text) is None


def resources(**kinds: dict[str, Any]) -> dict[str, Any]:
    return {"name": "c", "resources": kinds}


LIMITED = resources(limits={"cpu": "1", "memory": "1Gi"})
SAME = resources(
    limits={"cpu": "1", "memory": "1Gi"}, requests={"cpu": "1000m", "memory": "1024Mi"}
)
GPU = resources(limits={"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"})
LESS = resources(limits={"cpu": "1", "memory": "1Gi"}, requests={"cpu": "500m"})
NO_MEMORY = resources(limits={"cpu": "1"}, requests={"cpu": "1", "memory": "1Gi"})
NOTHING = resources(limits={"cpu": "0", "memory": "1Gi"})


@pytest.mark.parametrize(
    ("containers", "guaranteed"),
    [
        ([LIMITED], True),
        ([SAME], True),
        ([LIMITED, SAME, GPU], True),
        ([LESS], False),
        ([NO_MEMORY], False),
        ([NOTHING], False),
        ([LIMITED, {"name": "bare"}], False),
        ([{"name": "odd", "resources": []}], False),
        ([{"name": "odd", "resources": {"limits": "all"}}], False),
        ([], False),
    ],
)
def test_equal_limits_of_all_containers_are_guaranteed(
    containers: list[dict[str, Any]], guaranteed: bool
) -> None:
    assert is_guaranteed(containers) is guaranteed


def test_resources_of_the_whole_pod_are_named() -> None:
    spec = resources(limits={"cpu": "1"}, requests={"memory": "1Gi"})
    assert pod_level(spec) == {"cpu", "memory"}
    assert pod_level({}) == pod_level({"resources": {}}) == set()


AGENT = resources(requests={"memory": "64Mi", "cpu": "50m"}) | {"name": "elasticjob-agent"}
TRAINER = resources(limits={"memory": "16Mi"}) | {"name": "trainer"}
POD = {"spec": {"initContainers": [{"name": "fetch"}, AGENT], "containers": [TRAINER]}}
LEAST = "minimum memory usage per Container is 100Mi, but request is 64Mi"
LEAST_CPU = "minimum cpu usage per Container is 100m, but request is 50m"
OTHERS = "minimum memory usage per Container is 100Mi, but request is 16Mi"
UNLIMITED = "maximum cpu usage per Pod is 2.  No limit is specified"
RATIO = "memory max limit to request ratio per Container is 2, but provided ratio is 10.000000"
NO_LIMIT = (
    "cpu max limit to request ratio per Container is 2, but no limit is specified or limit is 0"
)
FORBIDDEN = 'pods "job-0" is forbidden: '


@pytest.mark.parametrize(
    ("message", "fields", "added"),
    [
        (LEAST, [], True),
        (f"[{LEAST}, {LEAST_CPU}]", [], True),
        (f"[{LEAST}, {OTHERS}]", [], False),
        (f"{FORBIDDEN}{LEAST}", [], True),
        (f"{FORBIDDEN}[{LEAST}, {LEAST_CPU}]", [], True),
        (f"{FORBIDDEN}[{LEAST}, {UNLIMITED}]", [], False),
        (f"{FORBIDDEN}[{UNLIMITED}, {LEAST}]", [], False),
        (f"admission webhook denied the request: {LEAST}", [], False),
        (f"{LEAST}; the image is not allowed", [], False),
        ("denied by a policy", [], False),
        ("", [], False),
        ("it is invalid", ["spec.initContainers[1].resources.requests"], True),
        ("it is invalid", ["spec.initContainers[1].resources.requests[memory]"], True),
        ("it is invalid", ["spec.initContainers[0].resources.requests"], False),
        ("it is invalid", ["spec.initContainers[1].image"], False),
        ("it is invalid", ["spec.initContainers[7].resources.requests"], False),
        (
            "it is invalid",
            ["spec.initContainers[1].resources.requests", "spec.containers[0].image"],
            False,
        ),
    ],
)
def test_refusal_of_added_resources_alone(message: str, fields: list[str], added: bool) -> None:
    assert refuses_added_resources(POD, message, fields) is added


LIMITS = resources(limits={"cpu": "1", "memory": "1Gi"})
EQUAL_POD = {"spec": {"initContainers": [AGENT], "containers": [LIMITS | {"name": "trainer"}]}}


@pytest.mark.parametrize(
    "message",
    [RATIO, f"[{RATIO}, {NO_LIMIT}]", f"[{LEAST}, {RATIO}]", f"{FORBIDDEN}[{NO_LIMIT}, {LEAST}]"],
)
def test_ratios_that_only_the_agent_exceeds_are_recognized_in_lists(message: str) -> None:
    assert refuses_added_resources(EQUAL_POD, message, [])


@pytest.mark.parametrize(
    "message",
    [
        "x" * 1_000_000,
        "maximum " * 125_000,
        "maximum " + "x" * 1_000_000,
        'pods "' * 166_000,
        f"{FORBIDDEN}service account {'x' * 16_000} not found",
        f"{FORBIDDEN}[{', '.join([LEAST] * 15_000)}]",
    ],
    ids=["token", "words", "resource", "prefixes", "name", "clauses"],
)
def test_long_refusal_is_read_in_linear_time(message: str) -> None:
    """In quadratic time, the first takes an hour."""
    assert not refuses_added_resources(POD, message, [])
