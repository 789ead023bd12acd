"""Jobs of extreme sizes, on a real API server: they disturb no other job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elasticjob_operator.domain.plan.planner import MAX_POD_ACTIONS
from tests.integration.apiserver import ApiServer, Refused
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.kube_helpers import Json
from tests.integration.operator_rig import SECONDS, Namespace, Operator

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elasticjob.dev"


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Yield a private server: another definition ends watches of other tests."""
    started = ApiServer(tmp_path_factory.mktemp("apiserver"))
    try:
        started.start()
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Yield a private etcd: the shared one belongs to the cluster of the shared API server."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory, api_server: ApiServer, etcd: EtcdServer
) -> Iterator[Operator]:
    replica = Operator(tmp_path_factory.mktemp("operator"), api_server, etcd)
    with replica.running():
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def test_large_job_is_created_in_several_reconciles(ns: Namespace, operator: Operator) -> None:
    count = MAX_POD_ACTIONS + 40
    ns.create_job("large", maxNodes=count)
    wait_until(lambda: bool(ns.pods()), "a pod", SECONDS)
    ns.create_job("small", maxNodes=1)
    wait_until(lambda: "small-0" in ns.pods(), "the small job", SECONDS)
    wait_until(lambda: len(ns.pods()) == count + 1, "all pods", 4 * SECONDS)
    ns.patch_job({"spec": {"nodes": 1}}, "large")
    wait_until(lambda: ns.pods() == ["large-0", "small-0"], "one pod", 4 * SECONDS)
    assert operator.page("/healthz")[0] == 200


@contextmanager
def definition_without_bounds(server: ApiServer) -> Iterator[None]:
    """Install a definition like that of an earlier release, which bounded no size."""

    def put(bounds: dict[str, int]) -> None:
        found = server.request("GET", CRD)
        schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        spec: Json = schema["properties"]["spec"]["properties"]
        for name, bound in bounds.items():
            spec[name]["maximum"] = bound
        server.request("PUT", CRD, found)

    names = ("minNodes", "maxNodes", "nodes")
    put(dict.fromkeys(names, 2**31 - 1))
    try:
        yield
    finally:
        put(dict.fromkeys(names, 16384))


def test_stored_job_beyond_the_bounds_is_set_aside(ns: Namespace) -> None:
    with definition_without_bounds(ns.server):

        def accepted() -> bool:
            try:
                ns.create_job("old", maxNodes=2**31 - 1)
            except Refused:
                return False
            return True

        wait_until(accepted, "the definition", SECONDS)
    ns.create_job("job", maxNodes=2)
    found = ns.await_condition("Stalled", "InvalidJob", "old")
    assert found["status"] == "True"
    assert "spec.maxNodes: must be at most 16384; got 2147483647" in found["message"]
    assert ns.condition("Ready", "old")["status"] == "False"
    assert ns.status("old")["observedGeneration"] == ns.job("old")["metadata"]["generation"]
    sentence = ns.status("old")["explanation"][0]
    assert found["message"] in sentence
    ns.await_event("InvalidJob", sentence.removesuffix("."), "old")
    ns.await_pods("job-0", "job-1")
    ns.patch_job({"spec": {"maxNodes": 1}}, "old")
    ns.await_pods("job-0", "job-1", "old-0")
    assert ns.await_condition("Stalled", "NotStalled", "old")["status"] == "False"
