"""Replacement of replicas: every action is done exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in

StartOperator = Callable[..., Operator]
_TAKEOVER_SECONDS = 60.0
_WRITES = re.compile(
    r'apiserver_request_total\{[^}]*resource="(?P<resource>[a-z]+)"[^}]*'
    r'verb="(?P<verb>POST|PUT|PATCH|APPLY|DELETE)"[^}]*\} (?P<count>\S+)'
)


@pytest.fixture
def start_operator(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> Iterator[StartOperator]:
    """Yield a function that starts replicas for the test's namespace alone."""
    options = alone_in(namespace)
    with ExitStack() as stack:

        def start(name: str = "operator-0") -> Operator:
            replica = Operator(tmp_path, api_server, newest_etcd, name, options)
            stack.callback(replica.close)
            return replica.start()

        yield start


def writes(server: ApiServer) -> float:
    """Return the number of mutating requests so far, except those for Leases."""
    text = server.fetch("GET", "/metrics").decode()
    found = (match for line in text.splitlines() if (match := _WRITES.match(line)))
    return sum(float(match["count"]) for match in found if match["resource"] != "leases")


def test_operator_restart_changes_nothing(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    ns, first = Namespace(api_server, namespace), start_operator()
    for name in ("one", "two", "three"):
        ns.create_job(name, minNodes=1, maxNodes=2)
        ns.await_status(name, pods=2)
    for name in ("one-0", "one-1"):
        ns.run_pod(name)
    ns.await_status("one", readyNodes=2)
    wait_until(lambda: first.metric("elasticjob_queue_depth") == 0, "an idle operator", SECONDS)
    assert first.stop() == 0

    before = writes(api_server)
    assert before > 0
    second = start_operator()

    def reconciled() -> bool:
        return second.metric("elasticjob_reconcile_seconds_count") >= 3

    wait_until(reconciled, "a look at each job", _TAKEOVER_SECONDS)
    wait_until(lambda: second.metric("elasticjob_queue_depth") == 0, "an idle operator", SECONDS)
    assert second.metric("elasticjob_jobs", phase="Pending") == 3
    assert writes(api_server) == before
    assert second.page("/healthz") == (200, "ok\n")


def test_changes_without_operator_are_applied_after_restart(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    ns, first = Namespace(api_server, namespace), start_operator()
    ns.create_job("kept", maxNodes=2)
    ns.create_job("gone", maxNodes=1)
    ns.await_pods("gone-0", "kept-0", "kept-1")
    first.kill()
    ns.remove_pod("kept-0")
    ns.scale(1, "kept")
    ns.server.request("DELETE", ns.path("elasticjobs", "gone"))
    ns.create_job("fresh", maxNodes=1)
    start_operator()
    wait_until(lambda: ns.pods() == ["fresh-0", "gone-0", "kept-1"], "pods", _TAKEOVER_SECONDS)


def test_one_replica_is_active_and_other_takes_over(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    ns = Namespace(api_server, namespace)
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert second.metric("elasticjob_leader") == 0
    assert second.page("/readyz")[0] == second.page("/healthz")[0] == 200
    ns.create_job("one", maxNodes=2)
    ns.await_pods("one-0", "one-1")
    first.kill()
    ns.create_job("two", maxNodes=1)
    wait_until(lambda: "two-0" in ns.pods(), "the second replica's work", _TAKEOVER_SECONDS)
    assert second.metric("elasticjob_leader") == 1
    assert ns.pods() == ["one-0", "one-1", "two-0"]


def test_terminated_replica_hands_over_at_once(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert first.stop() == 0
    leases = api_server.request(
        "GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    )
    [lease] = leases["items"]
    assert "first" not in (lease["spec"].get("holderIdentity") or ""), "the Lease is released"
    wait_until(lambda: second.metric("elasticjob_leader") == 1, "the other", SECONDS)


def test_standby_replica_ends_on_sigterm(start_operator: StartOperator) -> None:
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert second.stop() == 0


def test_api_server_outage_is_survived(tmp_path: Path, start_etcd: StartEtcd) -> None:
    server = ApiServer(tmp_path / "apiserver")
    operator = Operator(tmp_path, server, start_etcd())  # it serves one cluster alone
    try:
        ns = Namespace(server.start(), server.namespace("here"))
        operator.start()
        ns.create_job("one", maxNodes=1)
        ns.await_pods("one-0")
        server.kill()
        server.launch()
        server.wait_ready()
        ns.remove_pod("one-0")
        ns.create_job("two", maxNodes=1)

        def caught_up() -> bool:
            assert operator.process is not None
            if operator.process.poll() is not None:
                # Away for longer than the Lease lasts: it ends itself, and is started again.
                assert operator.process.returncode == 1
                operator.launch()
            return ns.pods() == ["one-0", "two-0"]

        wait_until(caught_up, "both jobs' pods", 60.0)
        wait_until(lambda: operator.page("/healthz")[0] == 200, "health", SECONDS)
    finally:
        operator.close()
        server.close()
