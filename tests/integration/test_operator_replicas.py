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
_TAKEOVER_SECONDS = 30.0
_HANDOVER_SECONDS = 7.0
"""Maximum of a hand-over: less than the eight seconds of a Lease that is not released."""
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
    here, first = Namespace(api_server, namespace), start_operator()
    for name in ("one", "two", "three"):
        here.create_job(name, minNodes=1, maxNodes=2)
        here.await_status(name, pods=2)
    for name in ("one-0", "one-1"):
        here.run_pod(name)
    here.await_status("one", readyNodes=2)
    wait_until(lambda: first.metric("elasticjob_queue_depth") == 0, "an idle operator", SECONDS)
    assert first.stop() == 0

    before = writes(api_server)
    assert before > 0
    second = start_operator()

    def looked() -> bool:
        return second.metric("elasticjob_reconcile_seconds_count") >= 3

    wait_until(looked, "a look at each job", _TAKEOVER_SECONDS)
    wait_until(lambda: second.metric("elasticjob_queue_depth") == 0, "an idle operator", SECONDS)
    assert second.metric("elasticjob_jobs", phase="Pending") == 3
    assert writes(api_server) == before
    assert second.page("/healthz") == (200, "ok\n")


def test_changes_without_operator_are_applied_after_restart(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    here, first = Namespace(api_server, namespace), start_operator()
    here.create_job("kept", maxNodes=2)
    here.create_job("gone", maxNodes=1)
    here.await_pods("gone-0", "kept-0", "kept-1")
    first.kill()
    here.remove_pod("kept-0")
    here.scale(1, "kept")
    here.server.request("DELETE", here.path("elasticjobs", "gone"))
    here.create_job("fresh", maxNodes=1)
    start_operator()
    wait_until(lambda: here.pods() == ["fresh-0", "gone-0", "kept-1"], "pods", _TAKEOVER_SECONDS)


def test_one_replica_is_active_and_other_takes_over(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    here = Namespace(api_server, namespace)
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert second.metric("elasticjob_leader") == 0
    assert second.page("/readyz")[0] == second.page("/healthz")[0] == 200
    here.create_job("one", maxNodes=2)
    here.await_pods("one-0", "one-1")
    first.kill()
    here.create_job("two", maxNodes=1)
    wait_until(lambda: "two-0" in here.pods(), "the second replica's work", _TAKEOVER_SECONDS)
    assert second.metric("elasticjob_leader") == 1
    assert here.pods() == ["one-0", "one-1", "two-0"]


def test_terminated_replica_hands_over_at_once(
    api_server: ApiServer, namespace: str, start_operator: StartOperator
) -> None:
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert first.stop() == 0
    wait_until(lambda: second.metric("elasticjob_leader") == 1, "the other", _HANDOVER_SECONDS)


def test_standby_replica_ends_on_sigterm(start_operator: StartOperator) -> None:
    first, second = start_operator("first"), start_operator("second")
    wait_until(lambda: first.metric("elasticjob_leader") == 1, "an active replica", SECONDS)
    assert second.stop() == 0


def test_api_server_outage_is_survived(tmp_path: Path, start_etcd: StartEtcd) -> None:
    server = ApiServer(tmp_path / "apiserver")
    operator = Operator(tmp_path, server, start_etcd())  # it serves one cluster alone
    try:
        here = Namespace(server.start(), server.namespace("here"))
        operator.start()
        here.create_job("one", maxNodes=1)
        here.await_pods("one-0")
        server.kill()
        server.launch()
        server.wait_ready()
        here.remove_pod("one-0")
        here.create_job("two", maxNodes=1)

        def caught_up() -> bool:
            assert operator.process is not None
            if operator.process.poll() is not None:
                # Away for longer than the Lease lasts: it ends itself, and is started again.
                assert operator.process.returncode == 1
                operator.launch()
            return here.pods() == ["one-0", "two-0"]

        wait_until(caught_up, "both jobs' pods", 60.0)
        wait_until(lambda: operator.page("/healthz")[0] == 200, "health", SECONDS)
    finally:
        operator.close()
        server.close()
