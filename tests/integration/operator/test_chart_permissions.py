"""Operator with exactly the chart's rights and the chart's environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.apiserver import NOBODY, ApiServer, Refused
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.helm_chart import MATRIX, NAMESPACE, Rendered, template
from tests.integration.operator_rig import SECONDS, Namespace, Operator

Json = dict[str, Any]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ACCOUNT = [{"kind": "User", "name": NOBODY, "apiGroup": "rbac.authorization.k8s.io"}]
LISTS_JOBS = {"apiGroups": ["elasticjob.dev"], "resources": ["elasticjobs"], "verbs": ["list"]}
"""Right without which an operator ends."""
_PLACE = re.compile(r'in the namespace \\*"([^"\\]+)')
_FIXED = ("ELASTICJOB_ETCD_ENDPOINTS", "ELASTICJOB_METRICS_PORT", "ELASTICJOB_HEALTH_PORT")


def rendered(release: str, values: Json) -> Rendered:
    text = template(MATRIX["neither"] | values, name=release)
    return Rendered([found for found in yaml.safe_load_all(text) if found])


def rights(chart: Rendered) -> Iterator[tuple[str, Json]]:
    """Yield each of the operator's roles and bindings with its path, bound to the test's user."""
    for found in chart.objects:
        kind, namespace = found["kind"], found["metadata"].get("namespace")
        if kind not in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"):
            continue
        plural = f"{kind.lower()}s"
        path = f"{RBAC}/namespaces/{namespace}/{plural}" if namespace else f"{RBAC}/{plural}"
        if kind.endswith("Binding"):
            if not found["subjects"][0]["name"].endswith("-operator"):
                continue
            found = found | {"subjects": _ACCOUNT}
        yield path, found


def jobs_binding(chart: Rendered) -> Json:
    """Return the binding that the binder creates in each namespace, for the test's user."""
    roles = (one["metadata"]["name"] for one in chart.objects if one["kind"] == "ClusterRole")
    name = next((name for name in roles if name.endswith("-operator-jobs")), "")
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    return {"metadata": {"name": name}, "roleRef": role, "subjects": _ACCOUNT}


def environment(chart: Rendered) -> dict[str, str]:
    """Return the chart's environment of the operator, except values that differ in a test."""
    deployments = [found for found in chart.objects if found["kind"] == "Deployment"]
    (deployment,) = (one for one in deployments if one["metadata"]["name"].endswith("-operator"))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    plain = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return {name: value for name, value in plain.items() if name not in _FIXED}


@pytest.mark.parametrize("scope", ["namespace", "cluster"])
def test_chart_permissions_suffice(
    scope: str, tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    values = {"watchNamespaces": [namespace]} if scope == "namespace" else {}
    chart, ns = rendered(f"ej-{scope}", values), Namespace(api_server, namespace)
    bound = [(f"{RBAC}/namespaces/{namespace}/rolebindings", jobs_binding(chart))]
    options = environment(chart) | {"ELASTICJOB_LEASE_NAMESPACE": NAMESPACE}
    replica = Operator(tmp_path, api_server, newest_etcd, options=options, user=NOBODY)
    with ExitStack() as stack:
        with suppress(Refused):  # another test has made it
            api_server.namespace(NAMESPACE)
        for path, body in [*rights(chart), *(bound if scope == "cluster" else ())]:
            api_server.request("POST", path, body)
            stack.callback(api_server.request, "DELETE", f"{path}/{body['metadata']['name']}")
        api_server.await_right(NOBODY, LISTS_JOBS, namespace)
        stack.callback(replica.close)
        replica.start()
        run_job_lifecycle(ns)
    assert not forbidden(replica.log, namespace)


def forbidden(log: Path, namespace: str) -> list[str]:
    """Return the log's lines of requests that the operator's rights do not cover.

    The operator of the whole cluster also meets jobs of other tests, in namespaces where nothing
    binds its role.
    """
    lines = [line for line in log.read_text().splitlines() if NOBODY in line and "cannot" in line]
    places = (namespace, NAMESPACE)
    return [line for line in lines if all(one in places for one in _PLACE.findall(line))]


def run_job_lifecycle(ns: Namespace) -> None:
    """Exercise every operation of the operator on a cluster."""
    ns.create_job(minNodes=1, maxNodes=3, runPolicy={"ttlSecondsAfterFinished": 1})
    ns.await_pods("job-0", "job-1", "job-2")
    for name in ns.pods():
        ns.run_pod(name)
    ns.await_status(readyNodes=3)
    budget = ns.get("poddisruptionbudgets", "job")
    assert budget is not None
    assert budget["spec"]["minAvailable"] == 1
    policy = ns.present("networkpolicies", "job-elasticjob")
    (owner,) = policy["metadata"]["ownerReferences"]
    assert owner["uid"] == ns.job()["metadata"]["uid"]
    (asking,) = policy["spec"]["ingress"][1]["from"]
    assert asking["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": NAMESPACE}
    assert asking["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    ns.scale(1)
    ns.await_pods("job-0")
    ns.await_event("PodsCreated", "created job-0, job-1, job-2")
    wait_until(
        lambda: ns.present("poddisruptionbudgets", "job")["spec"]["minAvailable"] == 0,
        "a budget for one",
        SECONDS,
    )
    ns.patch_job({"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
    wait_until(lambda: ns.get("elasticjobs", "job") is None, "the job's end", SECONDS)
