"""Permissions: roles, Secrets, tokens, networks; each as small as possible."""

from __future__ import annotations

import pytest
import yaml

from elasticjob_operator.domain.manifests.names import HEALTH_PORT
from tests.integration.helm_chart import EXTERNAL, MATRIX, NAMESPACE, Json, Rendered, render
from tests.paths import ROOT

GOLDEN = ROOT / "tests" / "unit" / "chart" / "golden" / "rbac.yaml"


def mounted_keys(pod: Json) -> set[str]:
    return {
        item["key"]
        for volume in pod["spec"].get("volumes", ())
        for item in volume.get("secret", {}).get("items", ())
    }


def test_pods_mount_only_required_keys_of_etcd_secret() -> None:
    pods = dict(render().pods())
    certificates = {f"{name}.{kind}" for name in ("operator", "agents") for kind in ("crt", "key")}
    keys = mounted_keys(pods["Deployment/elasticjob-operator"])
    assert keys == {"ca.crt", "user", "password"} | certificates
    assert mounted_keys(pods["StatefulSet/elasticjob-etcd"]) == {"ca.crt", "tls.crt", "tls.key"}
    for name, pod in pods.items():
        for volume in pod["spec"].get("volumes", ()):
            assert "secret" not in volume or volume["secret"]["items"], name


def test_only_api_server_clients_have_token() -> None:
    for name, pod in render().pods():
        blind = pod["spec"].get("automountServiceAccountToken") is False
        assert blind == (name == "StatefulSet/elasticjob-etcd")


def rules(rendered: Rendered) -> Json:
    """Return the rules of every role except those for people, by kind, namespace and name."""
    return {
        "/".join([o["kind"], o["metadata"].get("namespace", "-"), o["metadata"]["name"]]): o[
            "rules"
        ]
        for o in sorted(rendered.objects, key=lambda o: (o["kind"], o["metadata"]["name"]))
        if o["kind"] in ("Role", "ClusterRole")
    }


def test_permissions_equal_golden_file() -> None:
    golden = yaml.safe_load(GOLDEN.read_text())
    assert rules(render()) == golden["everywhere"]
    assert rules(render(MATRIX["three members"])) == golden["everywhere"]
    assert (
        rules(render({"watchNamespaces": ["team-a"], "rbac": {"aggregate": False}}))
        == (golden["in one namespace"])
    )


def test_every_role_is_bound_and_every_binding_has_service_account() -> None:
    for values in ({}, MATRIX["two namespaces"], MATRIX["little"]):
        rendered = render(values)
        roles, bound = set(), set()
        for name, pod in rendered.pods():
            if name.endswith("-binder"):  # binds its role in each namespace
                arguments = dict(
                    word.split("=", 1) for word in pod["spec"]["containers"][0]["args"]
                )
                bound.add(("ClusterRole", None, arguments["--cluster-role"]))
                namespace, account = arguments["--service-account"].split("/")
                assert (namespace, account) == (NAMESPACE, "elasticjob-operator") or (
                    account == "given"
                )
        for found in rendered.objects:
            place = found["metadata"].get("namespace")
            if found["kind"] in ("Role", "ClusterRole"):
                if found["metadata"]["labels"]["app.kubernetes.io/component"] != "users":
                    roles.add((found["kind"], place, found["metadata"]["name"]))
            elif found["kind"].endswith("Binding") and "roleRef" in found:
                bound.add((found["roleRef"]["kind"], place, found["roleRef"]["name"]))
                for subject in found["subjects"]:
                    assert subject["namespace"] == NAMESPACE
                    given = subject["name"] == "given"
                    assert given or rendered.has("ServiceAccount", subject["name"])
        assert roles == bound


def test_operator_with_namespace_list_has_no_access_to_other_namespaces() -> None:
    rendered = render(MATRIX["two namespaces"])
    found = rendered.find("ClusterRole", f"{NAMESPACE}-elasticjob-operator")
    nodes, identity = found["rules"]
    assert nodes["resources"] == ["nodes"]
    assert (identity["resources"], identity["resourceNames"]) == (["namespaces"], ["kube-system"])
    places = {
        o["metadata"]["namespace"]
        for o in rendered.objects
        if o["kind"] == "Role" and o["metadata"]["name"] == "elasticjob-operator"
    }
    assert places == {"team-a", "team-b"}


def test_only_operator_and_jobs_can_reach_etcd() -> None:
    jobs = {"matchExpressions": [{"key": "elasticjob.dev/job-name", "operator": "Exists"}]}
    clients = render().find("NetworkPolicy", "elasticjob-etcd")["spec"]["ingress"][0]
    assert [list(port.values()) for port in clients["ports"]] == [["client"]]
    operator, pods = clients["from"]
    assert operator["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert "namespaceSelector" not in operator
    assert pods == {"podSelector": jobs, "namespaceSelector": {}}
    some = render(MATRIX["two namespaces"]).find("NetworkPolicy", "elasticjob-etcd")
    assert some["spec"]["ingress"][0]["from"][1]["namespaceSelector"] == {
        "matchExpressions": [
            {
                "key": "kubernetes.io/metadata.name",
                "operator": "In",
                "values": ["team-a", "team-b"],
            }
        ]
    }


def test_restricted_namespace_lets_jobs_reach_each_other_etcd_and_dns() -> None:
    values = {"networkPolicy": {"jobNamespaces": ["team-a"], "jobs": False}}
    spec = render(values).find("NetworkPolicy", "elasticjob-jobs")["spec"]
    peers, dns, etcd = spec["egress"]
    assert spec["ingress"][0]["from"] == peers["to"]
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    assert etcd["ports"] == [{"port": 2379}]
    assert etcd["to"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": NAMESPACE
    }
    asking = spec["ingress"][1]
    assert asking["ports"] == [{"port": HEALTH_PORT}]
    operator = render(values).find("NetworkPolicy", "elasticjob-operator")
    assert asking["from"][0]["podSelector"] == operator["spec"]["podSelector"]
    allowed = {"allowedEndpoints": ["http://old:4001", "http://[fd00::1]:2379"]}
    wide = render(values | allowed).find("NetworkPolicy", "elasticjob-jobs")["spec"]
    assert wide["egress"][3] == {"ports": [{"port": 4001}, {"port": 2379}]}
    far = render(values | EXTERNAL).find("NetworkPolicy", "elasticjob-jobs")["spec"]
    assert far["egress"][2] == {"ports": [{"port": 2379}]}


def test_policy_of_each_job_replaces_the_namespaces_ingress() -> None:
    values = {"networkPolicy": {"jobNamespaces": ["team-a"]}}
    spec = render(values).find("NetworkPolicy", "elasticjob-jobs")["spec"]
    assert spec["policyTypes"] == ["Egress"]
    assert "ingress" not in spec, "policies add up: it would admit other jobs' pods"


@pytest.mark.parametrize("off", [{"jobs": False}, {"enabled": False}])
def test_without_job_policies_operator_gets_no_permission_for_them(off: Json) -> None:
    on, rendered = render(), render({"networkPolicy": off})
    role = f"{NAMESPACE}-elasticjob-operator-jobs"
    for chart, present in ((on, True), (rendered, False)):
        rules = chart.find("ClusterRole", role)["rules"]
        assert any("networkpolicies" in rule["resources"] for rule in rules) == present
        pod = chart.find("Deployment", "elasticjob-operator")["spec"]["template"]
        environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert environment.get("ELASTICJOB_NETWORK_POLICIES") == ("true" if present else None)
        labels = environment.get("ELASTICJOB_OPERATOR_LABELS", "")
        found = dict(label.split("=") for label in labels.split(",") if label)
        assert found.items() <= pod["metadata"]["labels"].items()
        assert bool(found) == present


def test_users_cannot_write_status() -> None:
    rendered = render()
    for role in ("view", "edit", "admin"):
        found = rendered.find("ClusterRole", f"{NAMESPACE}-elasticjob-{role}")
        assert (
            found["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        )
        for rule in found["rules"]:
            if "elasticjobs/status" in rule["resources"]:
                assert rule["verbs"] == ["get"]
            if role == "view":
                assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_admission_policy_needs_kubernetes_1_30() -> None:
    kinds = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert kinds <= render(kubernetes="v1.30.0").kinds()
    assert not kinds & render(kubernetes="v1.29.4").kinds()


@pytest.mark.parametrize("values", ["dashboard", "dashboard for browsers"])
def test_dashboard_has_no_rights_and_no_token(values: str) -> None:
    rendered = render(MATRIX[values])
    pod = dict(rendered.pods())["Deployment/elasticjob-dashboard"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    account = rendered.find("ServiceAccount", pod["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    subjects = [one for o in rendered.objects for one in o.get("subjects", ())]
    assert account["metadata"]["name"] not in [one["name"] for one in subjects]
    assert rules(rendered) == rules(render())
    assert not any("projected" in volume for volume in pod["volumes"])


def test_dashboard_without_certificate_has_no_service() -> None:
    name = "elasticjob-dashboard"
    assert "Deployment/elasticjob-dashboard" not in dict(render().pods())
    rendered = render(MATRIX["dashboard"])
    assert not rendered.has("Service", name)
    assert mounted_keys(dict(rendered.pods())[f"Deployment/{name}"]) == set()
    rendered = render(MATRIX["dashboard for browsers"])
    assert rendered.has("Service", name)
    pod = dict(rendered.pods())[f"Deployment/{name}"]
    assert mounted_keys(pod) == {"tls.crt", "tls.key"}
    arguments = pod["spec"]["containers"][0]["args"]
    assert "--host=jobs.example.org" in arguments
    assert f"--host={name}.{NAMESPACE}.svc" in arguments
