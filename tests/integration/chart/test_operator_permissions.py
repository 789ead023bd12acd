"""Operator's permissions and admission policy: sufficient, and no more than intended."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from tests.integration.apiserver import BINDER, OPERATOR, ApiServer, Refused
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.helm_chart import (
    NAMESPACE,
    Json,
    Rendered,
    environment,
    pod_template,
    render,
)
from tests.integration.operator_rig import SECONDS, Namespace, Operator, running_binder

POLICIES = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ROLE = f"{NAMESPACE}-elasticjob-operator-jobs"


LABEL = {"elasticjob.dev/serve": "true"}
SCOPES: dict[str, Json] = {
    "everywhere": {},
    "selected": {"watchNamespaceSelector": LABEL},
    "listed": {"watchNamespaces": ["team-a"]},
}


@pytest.fixture(scope="module", params=SCOPES)
def scope(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def chart(scope: str) -> Rendered:
    return render(SCOPES[scope] | {"rbac": {"aggregate": False}})


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, chart: Rendered, scope: str
) -> Iterator[ApiServer]:
    """Yield a private server with the operator's rights, the policies on its writes, the binder."""
    started = ApiServer(tmp_path_factory.mktemp("apiserver"))
    with ExitStack() as stack:
        stack.callback(started.close)
        started.start()
        for name in (NAMESPACE, "team-a", "team-b", "kube-system"):
            with suppress(Refused):  # kube-system exists
                started.namespace(name)
        for name in ("team-a", NAMESPACE, "kube-system"):
            started.patch(f"/api/v1/namespaces/{name}", {"metadata": {"labels": LABEL}})
        for found in chart.objects:
            component = found["metadata"]["labels"]["app.kubernetes.io/component"]
            if found["kind"].endswith(("Role", "RoleBinding")):
                if component in ("operator", "binder"):
                    give(started, found)
            elif found["metadata"]["name"].endswith("-writes"):
                plural = POLICIES[found["kind"]]
                started.request("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", found)
        if scope != "listed":
            folder = tmp_path_factory.mktemp("binder")
            stack.enter_context(running_binder(folder, started, binder_arguments(chart), BINDER))
        yield started


def binder_arguments(chart: Rendered) -> list[str]:
    pod = pod_template(chart.find("Deployment", "elasticjob-binder"))
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "elasticjob_operator", "bind"]
    return list(container["args"])


def give(server: ApiServer, found: Json) -> None:
    """Create a role or a binding."""
    namespace = found["metadata"].get("namespace")
    folder = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
    server.request("POST", f"{folder}/{found['kind'].lower()}s", found)


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory,
    server: ApiServer,
    chart: Rendered,
) -> Iterator[Operator]:
    pod = pod_template(chart.find("Deployment", "elasticjob-operator"))
    told = environment(pod)
    options = {
        "KUBECONFIG": str(server.kubeconfig(OPERATOR)),
        "ELASTICJOB_NAMESPACES": told["ELASTICJOB_NAMESPACES"],
        "ELASTICJOB_NAMESPACE_SELECTOR": told.get("ELASTICJOB_NAMESPACE_SELECTOR", ""),
        "ELASTICJOB_LEASE_NAMESPACE": NAMESPACE,
    }
    folder = tmp_path_factory.mktemp("operator")
    etcd = EtcdServer(folder / "etcd")  # it serves one cluster alone
    replica = Operator(folder, server, etcd, options=options, user=OPERATOR)
    lists = {"apiGroups": ["elasticjob.dev"], "resources": ["elasticjobs"], "verbs": ["list"]}
    try:
        etcd.start()
        server.await_right(OPERATOR, lists, "team-a")  # without it, the operator ends
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

    def told() -> bool:
        return {"PodsCreated", "PodsDeleted"} <= {reason for reason, _ in ns.events()}

    wait_until(told, "the events of the pods", SECONDS)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/elasticjob-operator"
    assert server.request("GET", lease)["spec"]["holderIdentity"].startswith(operator.name)
    assert operator.metric("elasticjob_reconcile_seconds_count") > 0
    assert operator.metric("elasticjob_errors_total", kind="Forbidden") == 0
    log = operator.log.read_text()
    assert "orbidden" not in log, log[-3000:]
    assert "cannot list nodes" not in log


def test_pod_without_owner_is_deleted_at_a_suspension(
    server: ApiServer, operator: Operator
) -> None:
    ns = Namespace(server, "team-a")
    ns.create_job(name="unowned", minNodes=1, maxNodes=2)
    ns.await_pods("unowned-0", "unowned-1")
    server.patch(ns.path("pods", "unowned-1"), {"metadata": {"ownerReferences": None}})
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "unowned")
    ns.await_status("unowned", phase="Suspended")
    assert ns.pods() == []
    server.request("DELETE", ns.path("elasticjobs", "unowned"))


def may(
    server: ApiServer,
    verb: str,
    resource: str,
    namespace: str,
    name: str = "",
    user: str = OPERATOR,
) -> bool:
    """Return True if the user is allowed to, according to the server's authorizer."""
    group, _, plural = resource.rpartition("/")
    attributes = {
        "verb": verb, "group": group, "resource": plural, "namespace": namespace, "name": name,
    }  # fmt: skip
    body = {"spec": {"user": user, "resourceAttributes": attributes}}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return bool(server.request("POST", path, body)["status"]["allowed"])


def test_secrets_are_readable_by_name_only(server: ApiServer) -> None:
    assert may(server, "get", "secrets", "team-a", "job-elasticjob")
    for verb in ("list", "watch", "delete", "deletecollection"):
        assert not may(server, verb, "secrets", "team-a")


def test_operator_cannot_read_or_write_secrets_of_system_namespaces(server: ApiServer) -> None:
    """The key of etcd's authority is in the release's namespace, which has the served label."""
    for namespace in (NAMESPACE, "kube-system"):
        for verb in ("get", "list", "watch", "create", "patch"):
            assert not may(server, verb, "secrets", namespace, "elasticjob-etcd-authority")
        assert not may(server, "create", "pods", namespace)
    secrets = f"/api/v1/namespaces/{NAMESPACE}/secrets"
    name = f"stolen-{uuid.uuid4().hex[:6]}"
    server.request("POST", secrets, {"metadata": {"name": name}, "data": {"ca.key": "eA=="}})
    with pytest.raises(Refused, match="cannot get resource"):
        server.request("GET", f"{secrets}/{name}", user=OPERATOR)


def test_other_namespaces_are_not_accessible(server: ApiServer, scope: str) -> None:
    served = scope == "everywhere"
    for verb, resource in (
        ("get", "pods"), ("create", "pods"), ("delete", "pods"), ("get", "secrets"),
        ("create", "secrets"), ("patch", "secrets"), ("get", "services"), ("create", "services"),
        ("create", "policy/poddisruptionbudgets"), ("patch", "networking.k8s.io/networkpolicies"),
    ):  # fmt: skip
        assert may(server, verb, resource, "team-b", "x") == served, (verb, resource)
    # With a selector it still sees ElasticJobs and pods, to name the reason in a job's status.
    for verb, resource in (("list", "pods"), ("get", "elasticjob.dev/elasticjobs")):
        assert may(server, verb, resource, "team-b", "x") == (scope != "listed")


def test_job_of_unserved_namespace_names_the_label_and_starts_once_it_is_there(
    server: ApiServer, operator: Operator, scope: str
) -> None:
    if scope != "selected":
        return
    ns = Namespace(server, server.namespace(f"team-{uuid.uuid4().hex[:6]}"))
    ns.create_job(minNodes=1, maxNodes=1)
    wait_until(
        lambda: ns.condition("PodsReady").get("reason") == "NamespaceNotServed",
        "the reason",
        SECONDS,
    )
    assert "label it elasticjob.dev/serve=true" in ns.condition("PodsReady")["message"]
    assert not ns.pods()
    path = f"/api/v1/namespaces/{ns.name}"
    server.patch(path, {"metadata": {"labels": LABEL}})
    wait_until(lambda: ns.pods() == ["job-0"], "the pod", 2 * SECONDS)
    server.patch(path, {"metadata": {"labels": dict.fromkeys(LABEL)}})
    wait_until(lambda: not may(server, "get", "secrets", ns.name, "x"), "no access", SECONDS)
    assert operator.ready()


def test_namespace_gets_access_at_once(server: ApiServer, scope: str) -> None:
    if scope != "everywhere":
        return
    name = server.namespace(f"new-{uuid.uuid4().hex[:6]}")
    wait_until(lambda: may(server, "create", "pods", name), "access", SECONDS)
    found = f"{RBAC}/namespaces/{name}/rolebindings/{ROLE}"
    server.request("DELETE", found)
    server.namespace(f"new-{uuid.uuid4().hex[:6]}")  # or within a minute
    wait_until(lambda: may(server, "create", "pods", name), "access again", SECONDS)


def test_stolen_token_of_the_binder_gives_access_to_nobody_else(
    server: ApiServer, chart: Rendered, scope: str
) -> None:
    if scope == "listed":
        assert not chart.has("ServiceAccount", "elasticjob-binder")
        return
    own = server.request("GET", f"{RBAC}/namespaces/team-a/rolebindings/{ROLE}")
    parts = {"roleRef": own["roleRef"], "subjects": own["subjects"]}
    good: Json = {"metadata": {"name": ROLE}, **parts}

    def refusal(namespace: str, body: Json) -> str:
        path = f"{RBAC}/namespaces/{namespace}/rolebindings?dryRun=All"
        with pytest.raises(Refused) as refused:
            server.request("POST", path, body, user=BINDER)
        return str(refused.value)

    def refuses(body: Json) -> bool:
        return "the binder may give access to the operator alone" in refusal("default", body)

    thief = [{"kind": "ServiceAccount", "name": "elasticjob-binder", "namespace": NAMESPACE}]
    for body in (
        good | {"subjects": thief},
        good | {"subjects": parts["subjects"] + thief},
        good | {"metadata": {"name": "another"}},
    ):
        wait_until(partial(refuses, body), "the policy", SECONDS)
    for namespace in (NAMESPACE, "kube-system"):
        assert f"may not give access to namespace {namespace}" in refusal(namespace, good)
    greater = good | {"roleRef": good["roleRef"] | {"name": "cluster-admin"}}
    assert "attempting to grant RBAC permissions" in refusal("default", greater)
    for verb, resource in (
        ("get", "secrets"), ("create", "pods"), ("patch", "rbac.authorization.k8s.io/rolebindings"),
        ("create", "rbac.authorization.k8s.io/clusterrolebindings"), ("patch", "namespaces"),
        ("patch", "rbac.authorization.k8s.io/clusterroles"), ("list", "pods"),
    ):  # fmt: skip
        assert not may(server, verb, resource, "team-a", ROLE, user=BINDER), (verb, resource)


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
