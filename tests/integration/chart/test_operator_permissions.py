"""Operator's permissions and admission policy: sufficient, and no more than intended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.apiserver import OPERATOR, ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.helm_chart import NAMESPACE, Json, render
from tests.integration.operator_rig import SECONDS, Namespace, Operator

POLICIES = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture(scope="module", params=[(), ("team-a",)], ids=["everywhere", "in one namespace"])
def watched(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, watched: list[str]) -> Iterator[ApiServer]:
    """Yield a private server with the operator's rights and the policy on its writes."""
    started = ApiServer(tmp_path_factory.mktemp("apiserver"))
    try:
        started.start()
        for name in (NAMESPACE, "team-a", "team-b"):
            started.namespace(name)
        for found in render({"watchNamespaces": watched, "rbac": {"aggregate": False}}).objects:
            component = found["metadata"]["labels"]["app.kubernetes.io/component"]
            if component == "operator" and found["kind"].endswith(("Role", "RoleBinding")):
                give(started, found)
            elif found["metadata"]["name"].endswith("-writes"):
                plural = POLICIES[found["kind"]]
                started.request("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", found)
        yield started
    finally:
        started.close()


def give(server: ApiServer, found: Json) -> None:
    """Create a role or a binding."""
    namespace = found["metadata"].get("namespace")
    folder = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
    server.request("POST", f"{folder}/{found['kind'].lower()}s", found)


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory,
    server: ApiServer,
    watched: list[str],
) -> Iterator[Operator]:
    options = {
        "KUBECONFIG": str(server.kubeconfig(OPERATOR)),
        "ELASTICJOB_NAMESPACES": ",".join(watched),
        "ELASTICJOB_LEASE_NAMESPACE": NAMESPACE,
    }
    folder = tmp_path_factory.mktemp("operator")
    etcd = EtcdServer(folder / "etcd")  # it serves one cluster alone
    replica = Operator(folder, server, etcd, options=options, user=OPERATOR)
    try:
        etcd.start()
        yield replica.start()
    finally:
        replica.close()
        etcd.close()


def test_permissions_suffice_for_whole_job_lifecycle(server: ApiServer, operator: Operator) -> None:
    ns = Namespace(server, "team-a")
    ns.create_job(minNodes=1, maxNodes=3, runPolicy={"ttlSecondsAfterFinished": 0})
    ns.await_pods("job-0", "job-1", "job-2")  # the absent spec.nodes was written
    for name in ns.pods():
        ns.run_pod(name)
    ns.await_status(readyNodes=3)
    ns.scale(2)
    wait_until(lambda: len(ns.pods()) == 2, "a pod less", SECONDS)
    ns.patch_job({"spec": {"elasticity": {"disruptionBudget": False}}})
    wait_until(lambda: ns.get("poddisruptionbudgets", "job") is None, "no budget", SECONDS)
    ns.patch_job({"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    wait_until(lambda: ns.get("elasticjobs", "job") is None, "the job's end", SECONDS)
    assert {"PodsCreated", "PodsDeleted"} <= {reason for reason, _ in ns.events()}
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/elasticjob-operator"
    assert server.request("GET", lease)["spec"]["holderIdentity"].startswith(operator.name)
    assert operator.metric("elasticjob_reconcile_seconds_count") > 0
    assert operator.metric("elasticjob_errors_total", kind="Forbidden") == 0
    log = operator.log.read_text()
    assert "orbidden" not in log, log[-3000:]
    assert "cannot list nodes" not in log


def may(server: ApiServer, verb: str, resource: str, namespace: str, name: str = "") -> bool:
    """Return True if the operator is allowed to, according to the server's authorizer."""
    group, _, plural = resource.rpartition("/")
    attributes = {
        "verb": verb, "group": group, "resource": plural, "namespace": namespace, "name": name,
    }  # fmt: skip
    body = {"spec": {"user": OPERATOR, "resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(server.request("POST", path, body)["status"]["allowed"])


def test_secrets_are_readable_by_name_only(server: ApiServer, watched: list[str]) -> None:
    assert may(server, "get", "secrets", "team-a", "job-elasticjob")
    for verb in ("list", "watch", "delete", "deletecollection"):
        assert not may(server, verb, "secrets", "team-a")
    # In the operator's own namespace only if it watches every namespace.
    assert may(server, "get", "secrets", NAMESPACE, "elasticjob-etcd") == (not watched)


def test_other_namespaces_are_not_accessible(server: ApiServer, watched: list[str]) -> None:
    for resource in ("pods", "secrets", "services", "elasticjob.dev/elasticjobs"):
        assert may(server, "get", resource, "team-b", "x") == (not watched)


def test_privileges_cannot_be_escalated(server: ApiServer) -> None:
    for verb, resource in (
        ("create", "pods/exec"),
        ("update", "pods"),
        ("patch", "pods"),
        ("update", "elasticjob.dev/elasticjobs"),
        ("create", "elasticjob.dev/elasticjobs"),
        ("patch", "nodes"),
        ("create", "serviceaccounts"),
        ("create", "rbac.authorization.k8s.io/rolebindings"),
        ("update", "coordination.k8s.io/leases"),
    ):
        assert not may(server, verb, resource, "team-a"), (verb, resource)
    assert not may(server, "get", "coordination.k8s.io/leases", NAMESPACE, "another")
