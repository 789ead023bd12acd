"""Chart on a real API server: accepted whole, installed, upgraded, uninstalled."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.programs import programs
from tests.integration.apiserver import NOBODY, OPERATOR, ApiServer, Refused
from tests.integration.helm_chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    RELEASE,
    HelmRefused,
    Json,
    helm,
    render,
)

SECONDS = 120.0
TAKE = "--take-ownership"
"""Option that takes over the definition, applied to the tests' server by hand."""
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elasticjob.dev"


JOB: Json = {
    "apiVersion": "elasticjob.dev/v1alpha1",
    "kind": "ElasticJob",
    "metadata": {"name": "kept"},
    "spec": {
        "minNodes": 1,
        "maxNodes": 2,
        "template": {"spec": {"containers": [{"name": "t", "image": "i:1", "command": ["a"]}]}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Yield a private server: the chart's cluster-wide objects disturb no other test."""
    started = ApiServer(tmp_path_factory.mktemp("apiserver"))
    try:
        started.start()
        for name in (NAMESPACE, "team-a", "team-b"):
            started.namespace(name)
        yield started
    finally:
        started.close()


def kubectl(
    kubeconfig: Path, *arguments: str, objects: list[Json]
) -> subprocess.CompletedProcess[str]:
    """Run kubectl with these objects on its standard input."""
    text = "\n---\n".join(json.dumps(found) for found in objects)
    program = str(programs("kubernetes") / "kubectl")
    return subprocess.run(
        [program, *arguments, "-f", "-", "--kubeconfig", str(kubeconfig)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("name", MATRIX)
def test_server_accepts_every_object(server: ApiServer, name: str) -> None:
    # Without kinds that the server does not define, which are the Prometheus Operator's.
    theirs = ("PrometheusRule", "ServiceMonitor")
    objects = [o for o in render(MATRIX[name]).objects if o["kind"] not in theirs]
    dry = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    done = kubectl(server.kubeconfig(), *dry, objects=objects)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(objects)


def test_restricted_namespace_admits_every_pod(server: ApiServer) -> None:
    guarded = server.namespace(f"restricted-{uuid.uuid4().hex[:8]}")
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.patch(f"/api/v1/namespaces/{guarded}", {"metadata": {"labels": label}})
    path = f"/api/v1/namespaces/{guarded}/pods?dryRun=All&fieldValidation=Strict"

    def made(pod: Json) -> Json:
        names = {volume["name"] for volume in pod["spec"].setdefault("volumes", [])}
        for mount in pod["spec"]["containers"][0].get("volumeMounts", ()):
            if mount["name"] not in names:  # of a StatefulSet's claim
                pod["spec"]["volumes"].append({"name": mount["name"], "emptyDir": {}})
        return {"metadata": {"generateName": "p-", **pod["metadata"]}, "spec": pod["spec"]}

    pods = dict(render({"etcd": {"members": 3}}).pods())
    assert len(pods) == 5
    for pod in pods.values():
        server.request("POST", path, made(pod))
    bad = made(pods["Deployment/elasticjob-operator"])
    del bad["spec"]["securityContext"]["runAsNonRoot"]
    with pytest.raises(Refused, match="violates PodSecurity"):
        server.request("POST", path, bad)


@pytest.fixture
def kubeconfig(server: ApiServer) -> Iterator[Path]:
    """Yield a kubeconfig for releases of the usual name, which is uninstalled at the end."""
    path = server.kubeconfig()
    yield path
    helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", kubeconfig=path)


def install(kubeconfig: Path, values: Json, *options: str, verb: str = "install") -> str:
    """Install or upgrade without the hook's job, which nothing runs here; return the notes."""
    words = ("--namespace", NAMESPACE, "--no-hooks", *options)
    said = helm(verb, RELEASE, str(CHART), *words, values=values, kubeconfig=kubeconfig)
    return said.partition("NOTES:\n")[2]


def names(server: ApiServer, path: str) -> set[str]:
    items = server.request("GET", f"{path}?labelSelector=app.kubernetes.io/instance={RELEASE}")
    return {item["metadata"]["name"] for item in items["items"]}


def test_chart_is_installed_upgraded_and_uninstalled(server: ApiServer, kubeconfig: Path) -> None:
    notes = install(kubeconfig, {}, TAKE)
    assert "kubectl apply -f examples/digits/elasticjob.yaml" in notes
    assert f"--namespace {NAMESPACE} rollout status deployment/elasticjob-operator" in notes
    deployments = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    assert names(server, deployments) == {"elasticjob-operator", "elasticjob-binder"}

    # An upgrade installs the chart's definition over any other.
    server.patch(CRD, {"spec": {"names": {"shortNames": ["old"]}}})
    values = {"watchNamespaces": ["team-a"], "operator": {"replicas": 2}}
    install(kubeconfig, values, verb="upgrade")
    assert server.request("GET", CRD)["spec"]["names"]["shortNames"] == ["ej"]
    found = server.request("GET", f"{deployments}/elasticjob-operator")
    assert found["spec"]["replicas"] == 2
    roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/team-a/roles"
    assert names(server, roles) == {"elasticjob-operator"}

    jobs = "/apis/elasticjob.dev/v1alpha1/namespaces/team-b/elasticjobs"
    server.request("POST", jobs, JOB)
    helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--no-hooks", kubeconfig=kubeconfig)
    assert names(server, deployments) == names(server, roles) == set()
    kept = server.request("GET", f"{jobs}/{JOB['metadata']['name']}")
    assert "deletionTimestamp" not in kept["metadata"]
    server.request("DELETE", f"{jobs}/{JOB['metadata']['name']}")

    install(kubeconfig, {})  # over the remains of the first release


def requires_certificates(server: ApiServer) -> bool:
    """Return True if the installed etcd refuses clients without a certificate."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/elasticjob-etcd"
    (container,) = server.request("GET", path)["spec"]["template"]["spec"]["containers"]
    return "--client-cert-auth" in container["command"]


def test_upgrade_requires_client_certificates_only_on_demand(
    server: ApiServer, kubeconfig: Path
) -> None:
    """Running pods of a release without client certificates go on using etcd."""
    optional = {"etcd": {"tls": {"clientCertificates": "Optional"}}}
    install(kubeconfig, optional, TAKE)
    assert not requires_certificates(server)
    said = install(kubeconfig, {}, verb="upgrade")
    assert not requires_certificates(server)
    assert "clientCertificates=Required" in said
    required = {"etcd": {"tls": {"clientCertificates": "Required"}}}
    assert "clientCertificates" not in install(kubeconfig, required, verb="upgrade")
    assert requires_certificates(server)
    install(kubeconfig, {}, verb="upgrade")
    assert requires_certificates(server)


def test_upgrade_that_changes_member_count_is_refused(server: ApiServer, kubeconfig: Path) -> None:
    install(kubeconfig, {}, TAKE)
    with pytest.raises(HelmRefused, match=r"etcd\.members must stay 1, with which this release"):
        install(kubeconfig, {"etcd": {"members": 3}}, verb="upgrade")
    install(kubeconfig, {"etcd": {"members": 1}}, verb="upgrade")


def test_prefix_with_a_digit_stays_where_the_server_accepted_it(
    server: ApiServer, kubeconfig: Path
) -> None:
    values = {"fullnameOverride": "1st"}
    with pytest.raises(HelmRefused, match="another prefix than 1st"):
        install(kubeconfig, values, TAKE)
    services = f"/api/v1/namespaces/{NAMESPACE}/services"
    service = {"metadata": {"name": "1st-operator"}, "spec": {"ports": [{"port": 8080}]}}
    server.request("POST", services, service)
    try:
        install(kubeconfig, values, TAKE)
        install(kubeconfig, values, verb="upgrade")
        assert "1st-etcd" in names(server, services)
    finally:
        helm("uninstall", RELEASE, "--namespace", NAMESPACE, kubeconfig=kubeconfig)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"etcd": {"persistence": {"enabled": False}}}, "etcd stores its data in its pod"),
        ({"networkPolicy": {"enabled": False}}, "No NetworkPolicy protects etcd"),
        ({"etcd": {"auth": {"enabled": False}}}, "etcd requires no password"),
        ({"admissionPolicy": {"enabled": False}}, "No admission policy is installed"),
        ({"crds": {"install": False}}, "not part of this release"),
        (
            {"watchNamespaceSelector": {"team": "a", "elasticjob.dev/serve": "true"}},
            "kubectl label namespace NAME elasticjob.dev/serve=true team=a",
        ),
        ({"watchNamespaces": [NAMESPACE]}, "can read the key of etcd's certificate authority"),
        (
            {"watchNamespaces": ["team-b", "team-a"]},
            "kubectl apply --namespace team-b -f examples/digits/elasticjob.yaml",
        ),
    ],
)
def test_notes_describe_special_settings(kubeconfig: Path, values: Json, said: str) -> None:
    usual = notes(kubeconfig, {})
    assert said not in usual
    assert said in notes(kubeconfig, values)
    for text in (usual, notes(kubeconfig, values)):
        assert not re.search(r"\n\n\n|<no value>|[{}]", text)


def notes(kubeconfig: Path, values: Json) -> str:
    words = ("--dry-run=server", "--namespace", NAMESPACE, TAKE, "-o", "json")
    said = helm("install", RELEASE, str(CHART), *words, values=values, kubeconfig=kubeconfig)
    found: dict[str, Any] = json.loads(said)
    return str(found["info"]["notes"])


def allow(
    server: ApiServer, namespace: str, resource: str, group: str = "", verb: str = "create"
) -> None:
    """Give NOBODY this permission for the resources of the namespace."""
    name = f"{verb}-{resource}"
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
    server.request("POST", f"{path}/roles", {"metadata": {"name": name}, "rules": [rule]})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "User", "name": NOBODY}],
    }
    server.request("POST", f"{path}/rolebindings", binding)


def apply_as_nobody(server: ApiServer, namespace: str, job: Json = JOB) -> str:
    """Return the server's refusal of a job of NOBODY, empty if it accepts the job."""
    path = f"/apis/elasticjob.dev/v1alpha1/namespaces/{namespace}/elasticjobs?dryRun=All"
    try:
        server.request("POST", path, job, user=NOBODY)
    except Refused as error:
        return str(error)
    return ""


def await_answer(server: ApiServer, namespace: str, wanted: str, job: Json = JOB) -> None:
    """Wait for a refusal with these words, or for acceptance: a policy takes a moment."""
    deadline = time.monotonic() + SECONDS
    said = apply_as_nobody(server, namespace, job)
    while said != wanted and not (wanted and wanted in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
        said = apply_as_nobody(server, namespace, job)


def test_user_without_pod_permission_cannot_create_jobs(
    server: ApiServer, kubeconfig: Path
) -> None:
    namespace = server.namespace("people")
    install(kubeconfig, {}, TAKE)
    allow(server, namespace, "elasticjobs", "elasticjob.dev")
    # Another policy requires these; the server reports either one of two refusals.
    allow(server, namespace, "services")
    allow(server, namespace, "poddisruptionbudgets", "policy")
    wanted = f"you must be allowed to create pods in namespace {namespace}"
    await_answer(server, namespace, wanted)
    allow(server, namespace, "pods")
    await_answer(server, namespace, "")


def test_user_without_service_or_budget_permission_gets_none_by_a_job(
    server: ApiServer, kubeconfig: Path
) -> None:
    namespace = server.namespace("few-rights")
    install(kubeconfig, {}, TAKE)
    for verb in ("create", "get", "patch"):
        allow(server, namespace, "elasticjobs", "elasticjob.dev", verb)
    allow(server, namespace, "pods")
    without = {**JOB, "spec": {**JOB["spec"], "elasticity": {"disruptionBudget": False}}}

    await_answer(
        server, namespace, f"you must be allowed to create services in namespace {namespace}"
    )
    allow(server, namespace, "services")
    await_answer(
        server,
        namespace,
        f"you must be allowed to create poddisruptionbudgets in namespace {namespace}",
    )
    await_answer(server, namespace, "", without)
    # A job without a budget gets none later either; its size may change.
    path = f"/apis/elasticjob.dev/v1alpha1/namespaces/{namespace}/elasticjobs"
    server.request("POST", path, without)
    merge = "application/merge-patch+json"
    for spec in ({"elasticity": {"disruptionBudget": True}}, {"elasticity": None}):
        with pytest.raises(Refused, match="create poddisruptionbudgets"):
            server.request("PATCH", f"{path}/kept", {"spec": spec}, user=NOBODY, content_type=merge)
    server.request(
        "PATCH", f"{path}/kept", {"spec": {"maxNodes": 1}}, user=NOBODY, content_type=merge
    )
    # Without minNodes its default, maxNodes, is the size of the budget.
    fixed = sized("fixed")
    del fixed["spec"]["minNodes"]
    server.request("POST", path, fixed)
    server.request(
        "PATCH", f"{path}/fixed", {"spec": {"nodes": 2}}, user=NOBODY, content_type=merge
    )
    with pytest.raises(Refused, match="create poddisruptionbudgets"):
        server.request(
            "PATCH", f"{path}/fixed", {"spec": {"maxNodes": 3}}, user=NOBODY, content_type=merge
        )
    allow(server, namespace, "poddisruptionbudgets", "policy")
    server.request("DELETE", f"{path}/kept")
    await_answer(server, namespace, "")


def test_switch_allows_jobs_of_users_without_service_permission(
    server: ApiServer, kubeconfig: Path
) -> None:
    namespace = server.namespace("pods-only")
    install(kubeconfig, {"admissionPolicy": {"ownedObjects": False}}, TAKE)
    allow(server, namespace, "elasticjobs", "elasticjob.dev")
    allow(server, namespace, "pods")
    await_answer(server, namespace, "")


LIMITS = {"admissionPolicy": {"maxNodes": 8, "maxNprocPerNode": 4}}


def sized(name: str, **spec: Any) -> Json:
    return {**JOB, "metadata": {"name": name}, "spec": {**JOB["spec"], **spec}}


def await_refusal(server: ApiServer, method: str, path: str, body: Json, words: str) -> None:
    """Wait until the policy, which takes a moment, refuses this dry run with these words."""
    deadline, said = time.monotonic() + SECONDS, ""
    while words not in said:
        assert time.monotonic() < deadline, said
        try:
            server.request(method, f"{path}?dryRun=All", body)
        except Refused as error:
            said = str(error)
        time.sleep(0.2)


def test_job_beyond_the_maxima_of_the_cluster_is_refused(
    server: ApiServer, kubeconfig: Path
) -> None:
    namespace = server.namespace("sized")
    jobs = f"/apis/elasticjob.dev/v1alpha1/namespaces/{namespace}/elasticjobs"
    install(kubeconfig, {}, TAKE)
    server.request("POST", jobs, sized("old", maxNodes=100, nprocPerNode=16))
    install(kubeconfig, LIMITS, verb="upgrade")
    await_refusal(
        server, "POST", jobs, sized("new", maxNodes=9), "spec.maxNodes: must be at most 8"
    )
    for workers in (5, "5"):
        new = sized("new", nprocPerNode=workers)
        await_refusal(server, "POST", jobs, new, "spec.nprocPerNode: must be at most 4")
    for accepted in (4, "4", "auto", "gpu", None):
        new = sized("new", maxNodes=8, nprocPerNode=accepted)
        server.request("POST", f"{jobs}?dryRun=All", new)
    # A stored job goes on, and may shrink.
    old = f"{jobs}/old"
    server.patch(old, {"spec": {"runPolicy": {"suspend": True}}})
    server.patch(old, {"spec": {"maxNodes": 50}})
    await_refusal(
        server, "PUT", old, grown(server.request("GET", old), 51), "spec.maxNodes: must be at most"
    )
    server.request("DELETE", old)


def grown(job: Json, nodes: int) -> Json:
    return {**job, "spec": {**job["spec"], "maxNodes": nodes}}


OWNER: Json = {
    "apiVersion": "elasticjob.dev/v1alpha1",
    "kind": "ElasticJob",
    "name": "job",
    "uid": "a-uid",
    "controller": True,
}
FOREIGN_OWNERS: list[list[Json]] = [
    [],
    [OWNER | {"controller": False}],
    [OWNER | {"apiVersion": "apps/v1"}],
    [OWNER | {"kind": "Deployment", "apiVersion": "apps/v1"}],
]


def owned_object(kind: str, namespace: str, owners: list[Json]) -> Json:
    """Return a Secret or a pod with these owner references."""
    version = {"apiVersion": "v1", "kind": kind}
    metadata = {"name": "object", "namespace": namespace, "ownerReferences": owners}
    spec = {"containers": [{"name": "main", "image": "image:1"}]}
    return {**version, "metadata": metadata, **({"spec": spec} if kind == "Pod" else {})}


def refusal(server: ApiServer, *words: str, objects: list[Json]) -> str:
    """Return the server's refusal of a write by the operator, empty if it accepts it."""
    done = kubectl(server.kubeconfig(OPERATOR), *words, "--dry-run=server", objects=objects)
    return done.stderr if done.returncode else ""


@pytest.fixture
def limited(server: ApiServer, kubeconfig: Path) -> Iterator[None]:
    """Install the chart and wait until its policy on the operator's writes is in force.

    The operator's role is bound in the namespaces of the test, as the binder does, and also in
    those where the binder does not.
    """
    install(kubeconfig, {}, TAKE)
    group = "rbac.authorization.k8s.io"
    role = {
        "apiGroup": group,
        "kind": "ClusterRole",
        "name": f"{NAMESPACE}-elasticjob-operator-jobs",
    }
    binding = {
        "metadata": {"name": "bound-by-a-test"},
        "roleRef": role,
        "subjects": [{"apiGroup": group, "kind": "User", "name": OPERATOR}],
    }
    paths = [
        f"/apis/{group}/v1/namespaces/{namespace}/rolebindings"
        for namespace in ("team-a", "kube-system", NAMESPACE)
    ]
    for path in paths:
        server.request("POST", path, binding)
    deadline = time.monotonic() + SECONDS
    while "ElasticJob controls" not in refusal(
        server, "create", objects=[owned_object("Secret", "team-a", [])]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield
    for path in paths:
        server.request("DELETE", f"{path}/bound-by-a-test")


@pytest.mark.usefixtures("limited")
def test_operator_writes_only_objects_of_jobs_outside_system_namespaces(
    server: ApiServer,
) -> None:
    for kind in ("Secret", "Pod"):
        own = owned_object(kind, "team-a", [OWNER])
        assert not refusal(server, "create", objects=[own])
        for owners in FOREIGN_OWNERS:
            foreign = owned_object(kind, "team-a", owners)
            assert "ElasticJob controls" in refusal(server, "create", objects=[foreign]), owners
        for namespace in ("kube-system", NAMESPACE):
            own = owned_object(kind, namespace, [OWNER])
            said = refusal(server, "create", objects=[own])
            assert f"may not write in namespace {namespace}" in said
    path = "/api/v1/namespaces/team-a/secrets"
    server.request("POST", path, owned_object("Secret", "team-a", []))  # not the operator's
    taken = json.dumps({"metadata": {"ownerReferences": [OWNER]}, "data": {"key": "eA=="}})
    words = ("patch", "--type=merge", f"--patch={taken}")
    foreign = owned_object("Secret", "team-a", [])
    assert "ElasticJob controls" in refusal(server, *words, objects=[foreign])
    server.request("DELETE", f"{path}/object")
