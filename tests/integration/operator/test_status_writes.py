"""Writes of the status, counted by an operator that serves one job."""

from __future__ import annotations

import time

from tests.integration.operator.single_operator import ns, operator
from tests.integration.operator_rig import SECONDS, Namespace, Operator

__all__ = ["ns", "operator"]

QUIET_SECONDS = 1.5


def quiet(operator: Operator, metric: str) -> float:
    """Return the metric once it no longer changes."""
    deadline, since = time.monotonic() + SECONDS, time.monotonic()
    seen = operator.metric(metric)
    while time.monotonic() < since + QUIET_SECONDS:
        assert time.monotonic() < deadline, f"{metric} never rests"
        time.sleep(0.1)
        if (now := operator.metric(metric)) != seen:
            seen, since = now, time.monotonic()
    return seen


def test_one_reconcile_writes_status_once(ns: Namespace, operator: Operator) -> None:
    before = quiet(operator, "elasticjob_status_writes_total")
    ns.create_job(maxNodes=4, nodes=4)
    ns.await_status(pods=4)
    written = quiet(operator, "elasticjob_status_writes_total")
    # One for four pods, and perhaps one for what the watches deliver later.
    assert before < written <= before + 2
