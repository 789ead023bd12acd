"""Queries of the Grafana dashboard on a real Prometheus that scrapes a real operator and etcd."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import start_http_server

from elasticjob_operator.metrics import Metrics
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_rendezvous.protocol.coordinator.cause_counts import counted
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Snapshots
from elasticjob_rendezvous.protocol.records.timings import History
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer
from tests.integration.helm_chart import CHART
from tests.integration.operator.agent_records import Agents, running
from tests.integration.operator_rig import Namespace, Operator, alone_in
from tests.integration.prometheus import Prometheus, scraping

DASHBOARD: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
PLACE = "elasticjob-system"
DATA_SECONDS = 240.0
RATE_INTERVAL = "60s"
"""Thirty scrapes: on a busy machine some fail."""
_NAME = re.compile(r"\b((?:elasticjob|etcd)_\w+)")


def queries() -> dict[str, str]:
    """Return the expression of each panel's target, with Grafana's variables filled in."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            text = text.replace("$namespace", PLACE).replace("$cause", ".*")
            found[f"{panel['title']}: {target['refId']}"] = text
    return found


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd", syncs=True)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> Iterator[Operator]:
    replica = Operator(tmp_path, api_server, etcd, options=alone_in(namespace))
    with replica.running():
        yield replica


def failing_replica() -> tuple[Metrics, int]:
    """Return the metrics of a second replica, and their port.

    It has what cannot be had beside a job that runs: the errors of an operator that etcd refuses,
    and planned stops.
    """
    metrics = Metrics()
    server, _ = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    return metrics, int(server.server_port)


def act(number: int, agents: Agents, ns: Namespace, failing: Metrics) -> None:
    """Let the job have a further round with all parts of its cost, and lose a pod."""
    kind = (CauseKind.LOSS, CauseKind.FAILURE, CauseKind.LEAVE)[number % 3]
    cause = Cause(kind, ("job-1",))
    if kind is CauseKind.FAILURE:
        agents.charged = (*agents.charged, number - 1)
    agents.counts = counted(agents.counts, kind)
    agents.snapshots = Snapshots(number)
    agents.seal(number, cause)
    final_ms = time.time_ns() // 1_000_000
    record = History(number, cause, 2, final_ms, detect_ms=5, stop_ms=120, join_ms=80)
    record = replace(record, backoff_ms=10, confirm_ms=4, cold_nodes=1)
    agents.put(agents.keys.history(number), replace(record, start_ms=30, first_step_ms=70))
    ns.scale(1 if number % 2 else 2)
    failing.count_error(Retry("etcd refuses", kind="EtcdRefused"))
    failing.stops.labels("Saved").inc()


def empty(server: Prometheus) -> dict[str, str]:
    """Return the queries without a number as result."""
    return {
        name: text
        for name, text in queries().items()
        if not [value for value in server.values(text) if not math.isnan(value)]
    }


@pytest.mark.timeout(300)
def test_every_query_of_the_dashboard_returns_data(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, operator: Operator, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    agents = running(ns, etcd, 2)
    failing, port = failing_replica()
    etcd_port = int(etcd.url.rpartition(":")[2])
    pods = {"operator-0": operator.ports.numbers[1], "operator-1": port, "etcd-0": etcd_port}
    assert len(queries()) > 20
    with scraping(tmp_path, pods, namespace=PLACE) as server:
        due = time.monotonic() + DATA_SECONDS
        number = 2
        while without := empty(server):
            assert time.monotonic() < due, f"no data: {json.dumps(without, indent=2)}"
            act(number, agents, ns, failing)
            number += 1
            time.sleep(1)
        known = set(server.ask("label/__name__/values"))
        asked = {name for text in queries().values() for name in _NAME.findall(text)}
        assert asked <= known
        for variable in DASHBOARD["templating"]["list"]:
            if found := re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]):
                series = server.ask("series", **{"match[]": found[1]})
                assert all(found[2] in one for one in series)
                assert series
        with pytest.raises(AssertionError, match="parse error"):
            server.values("sum(rate(elasticjob_rounds_total[20s])")
