"""Minimum number of pods that a drain must leave."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.plan.sizes import min_available
from tests.unit.operator.builders import job


@pytest.mark.parametrize(("ready", "least"), [(0, 1), (1, 1), (2, 1), (3, 2), (8, 2)], ids=str)
def test_minimum_is_protected_while_more_nodes_run(ready: int, least: int) -> None:
    assert min_available(job(minNodes=2, maxNodes=8), ready) == least


def test_disabled_budget_is_not_created() -> None:
    assert min_available(job(elasticity={"disruptionBudget": False}), 4) is None
