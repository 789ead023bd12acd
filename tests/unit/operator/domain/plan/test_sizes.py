"""Legal sizes, and the clamping of the wanted size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_operator.domain.plan.actions import DeletePod, WriteNodes
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.plan.sizes import (
    Clamp,
    WantedSize,
    legal_sizes,
    min_available,
    wanted_size,
)
from elasticjob_operator.model import Phase, Status, parse_manifest
from tests.unit.operator.builders import NOW, job, manifest, observed, running


@pytest.mark.parametrize(
    ("low", "high", "step", "sizes"),
    [
        (1, 4, 1, [1, 2, 3, 4]),
        (2, 9, 4, [2, 6]),
        (2, 10, 4, [2, 6, 10]),
        (3, 3, 1, [3]),
        (3, 5, 9, [3]),
    ],
)
def test_legal_sizes(low: int, high: int, step: int, sizes: list[int]) -> None:
    spec = job(minNodes=low, maxNodes=high, nodeIncrement=step).spec
    assert list(legal_sizes(spec)) == sizes


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, WantedSize(6, 9)),
        (0, WantedSize(2, 0, Clamp.BELOW_MIN_NODES)),
        (1, WantedSize(2, 1, Clamp.BELOW_MIN_NODES)),
        (2, WantedSize(2, 2)),
        (5, WantedSize(2, 5, Clamp.BETWEEN_INCREMENTS)),
        (6, WantedSize(6, 6)),
        (9, WantedSize(6, 9, Clamp.BETWEEN_INCREMENTS)),
        (10, WantedSize(6, 10, Clamp.ABOVE_MAX_NODES)),
    ],
)
def test_wanted_size_is_clamped_with_a_reason(asked: int | None, wanted: WantedSize) -> None:
    assert wanted_size(job(minNodes=2, maxNodes=9, nodeIncrement=4, nodes=asked)) == wanted


def owner(manager: str, *fields: str, **entry: Any) -> dict[str, Any]:
    """Return an entry of managedFields for these fields of the spec."""
    owned: dict[str, Any] = {f"f:{name}": {} for name in fields}
    return {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": owned}} | entry


OPERATOR = owner("elasticjob-operator", "nodes")
OWNERS: dict[str, tuple[Any, bool]] = {
    # metadata.managedFields, whether spec.nodes follows maxNodes
    "the operator": ([owner("kubectl", "maxNodes"), OPERATOR], True),
    "the operator, by the scale subresource": ([OPERATOR | {"subresource": "scale"}], True),
    "another": ([owner("kubectl", "nodes"), owner("elasticjob-operator", "minNodes")], False),
    "the operator and another": ([OPERATOR, owner("gitops", "nodes", operation="Apply")], False),
    "nobody": ([owner("kubectl", "maxNodes")], False),
    "unknown": (None, False),
    "cleared": ([{}], False),
    "of an unknown form": ([{"manager": "elasticjob-operator", "fieldsV1": "?"}, 1], False),
}


@pytest.mark.parametrize(("owners", "follows"), OWNERS.values(), ids=OWNERS)
def test_size_follows_maximum_while_the_operator_alone_owns_it(owners: Any, follows: bool) -> None:
    document = manifest(minNodes=1, maxNodes=9, nodes=4)
    document["metadata"]["managedFields"] = owners
    a_job = parse_manifest(document)
    assert wanted_size(a_job) == (WantedSize(9, 9) if follows else WantedSize(4, 4))
    written = [one for one in plan(a_job, observed(), NOW).actions if isinstance(one, WriteNodes)]
    assert written == ([WriteNodes(9)] if follows else [])


@pytest.mark.parametrize(
    ("status", "policy", "deleted", "written"),
    [
        (None, {}, False, True),
        (None, {"suspend": True}, False, True),
        (Status(phase=Phase.SUSPENDED), {}, False, True),
        (Status(phase=Phase.SUCCEEDED), {}, False, False),
        (None, {}, True, False),
    ],
    ids=["active", "suspended", "resumed", "finished", "deleted"],
)
def test_open_size_is_written_first_unless_the_job_is_over(
    status: Status | None, policy: dict[str, Any], deleted: bool, written: bool
) -> None:
    a_job = job(status, deleted, nodes=None, maxNodes=3, runPolicy=policy)
    actions = plan(a_job, observed(), NOW).actions
    assert (actions[:1] == (WriteNodes(3),)) == written
    assert not any(isinstance(one, WriteNodes) for one in actions[1:])


def test_suspension_comes_before_the_write_of_an_open_size() -> None:
    a_job = job(nodes=None, maxNodes=3, runPolicy={"suspend": True})
    actions = plan(a_job, observed(*running(2)), NOW).actions
    assert [type(one) for one in actions] == [DeletePod, DeletePod, WriteNodes]


def test_absent_minimum_is_the_maximum() -> None:
    a_job = job(minNodes=None, maxNodes=3, nodes=1)
    assert (a_job.spec.min_nodes, list(legal_sizes(a_job.spec))) == (3, [3])
    assert wanted_size(a_job) == WantedSize(3, 1, Clamp.BELOW_MIN_NODES)
    assert min_available(a_job, ready=3) == 2
    assert "minNodes" not in a_job.manifest()["spec"]


@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 60), st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_wanted_size_is_nearest_legal_size_below(
    low: int, more: int, step: int, asked: int
) -> None:
    a_job = job(minNodes=low, maxNodes=low + more, nodeIncrement=step, nodes=asked)
    sizes = list(legal_sizes(a_job.spec))
    wanted = wanted_size(a_job)
    assert wanted.nodes == max((size for size in sizes if size <= asked), default=low)
    assert (wanted.clamp is None) == (asked in sizes)
