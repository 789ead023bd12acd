"""Removal order of surplus pods."""

from __future__ import annotations

import pytest

from elasticjob_operator.domain.observed.state import NodeState
from elasticjob_operator.domain.plan.actions import DeleteReason
from elasticjob_operator.domain.plan.surplus import surplus
from tests.unit.operator.builders import final_round, pod

GANG = [
    pod(0).get(),
    pod(1).on(NodeState.CORDONED).get(),
    pod(2).get(),
    pod(3).on(NodeState.TAINTED).get(),
    pod(4).get(),  # waits: the round has ranks for 0 to 3 alone
    pod(5).pending(10).get(),
    pod(6).pending(10, node_state=NodeState.CORDONED).get(),
]
ORDER = [
    ("job-6", DeleteReason.SURPLUS_PENDING),
    ("job-5", DeleteReason.SURPLUS_PENDING),
    ("job-3", DeleteReason.SURPLUS_NODE_TAINTED),
    ("job-1", DeleteReason.SURPLUS_NODE_CORDONED),
    ("job-4", DeleteReason.SURPLUS_NOT_IN_ROUND),
    ("job-2", DeleteReason.SURPLUS_HIGHEST_RANK),
    ("job-0", DeleteReason.SURPLUS_HIGHEST_RANK),
]


@pytest.mark.parametrize("number", [-1, 0, 1, 3, 7, 9])
def test_cheapest_pods_are_deleted_first(number: int) -> None:
    found = [(victim.name, reason) for victim, reason in surplus(GANG, final_round(4), number)]
    assert found == ORDER[: max(number, 0)]


def test_ranks_decide_instead_of_indices() -> None:
    view = final_round(3)
    swapped = {id: 2 - rank for id, rank in view.ranks.items()}
    pods = [pod(index).get() for index in range(3)]
    [(victim, _)] = surplus(pods, final_round(3, ranks=swapped), 1)
    assert victim.name == "job-0"
