"""Refusals of a pod for the resources of added containers: fields, bounds, ratios, long texts."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.manifests.resource_refusals import refuses_added_resources
from tests.unit.operator.domain.manifests.test_resources import LIMITED, resources

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
UNSPECIFIED = (
    "failed quota: q: must specify limits.cpu for: elasticjob-agent,elasticjob-launcher; "
    "limits.memory for: elasticjob-agent"
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
        (f"{FORBIDDEN}{UNSPECIFIED}", [], True),
        (f"{FORBIDDEN}{UNSPECIFIED},trainer", [], False),
        (f"{FORBIDDEN}{UNSPECIFIED}; and more", [], False),
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


EQUAL_POD = {"spec": {"initContainers": [AGENT], "containers": [LIMITED | {"name": "trainer"}]}}


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
        f"{FORBIDDEN}[{', '.join([LEAST] * 20_000)}]",
    ],
    ids=["token", "words", "resource", "prefixes", "name", "clauses"],
)
def test_long_refusal_is_read_in_linear_time(message: str) -> None:
    """In quadratic time, the first takes an hour."""
    assert not refuses_added_resources(POD, message, [])


def test_long_refusal_of_the_agents_resources_alone_is_recognized() -> None:
    bounds = [f"minimum memory usage per Container is {size}Mi" for size in range(100, 1100)]
    clauses = [f"{bound}, but request is 64Mi" for bound in bounds]
    message = f"{FORBIDDEN}[{', '.join(clauses)}]"
    assert len(message) > 60_000
    assert refuses_added_resources(POD, message, [])
    assert not refuses_added_resources(POD, message.replace("64Mi]", "16Mi]"), [])
