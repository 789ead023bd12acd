"""Quantities and quality-of-service classes."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.resources import (
    is_guaranteed,
    pod_level,
    quantity,
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
