"""Writes of the status, counted by an operator that serves one job."""

from __future__ import annotations

import time

from tests.integration.apiserver import Refused
from tests.integration.etcd_server import wait_until
from tests.integration.operator.admission import admission_policy, rule
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


def test_refused_status_is_an_event_and_the_job_runs(ns: Namespace) -> None:
    denied = {"expression": "false", "message": "no status here", "reason": "Forbidden"}
    where = rule("elasticjob.dev", "elasticjobs/status", "UPDATE")
    with admission_policy(ns, "Validating", where, validations=[denied]):
        ns.create_job("probe", runPolicy={"suspend": True})
        path = ns.path("elasticjobs", "probe") + "/status?dryRun=All"

        def refused() -> bool:
            try:
                ns.server.patch(path, {"status": {"restarts": time.time_ns() % 1000}})
            except Refused as error:
                return error.status == 403
            return False

        wait_until(refused, "the policy", SECONDS)
        ns.create_job(minNodes=1, maxNodes=2)
        ns.await_pods("job-0", "job-1")

        def told() -> bool:
            found = [text for reason, text in ns.events() if reason == "StatusRefused"]
            return any("no status here; let the policy, webhook or role" in one for one in found)

        wait_until(told, "the event", SECONDS)
        ns.scale(1)
        ns.await_pods("job-0")
    ns.patch_job({"metadata": {"labels": {"changed": "1"}}})
    ns.await_status(phase="Pending", pods=1)


def test_one_reconcile_writes_status_once(ns: Namespace, operator: Operator) -> None:
    before = quiet(operator, "elasticjob_status_writes_total")
    ns.create_job(maxNodes=4, nodes=4)
    ns.await_status(pods=4)
    written = quiet(operator, "elasticjob_status_writes_total")
    # One for four pods, and perhaps one for what the watches deliver later.
    assert before < written <= before + 2
