"""Findings about a cluster and the operator in it."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from elasticjob_cli.doctor.cluster_checks import ClusterFacts, cluster_findings, schema_paths
from elasticjob_cli.doctor.findings import Finding, Grade, Unread

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCHEMA = {"properties": {"spec": {"type": "object", "properties": {"nodes": {"type": "integer"}}}}}


def named(name: str, namespace: str = "sys", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, **fields}


def definition(schema: dict[str, Any] = SCHEMA, version: str = "v1", established: str = "True"):
    served = {"name": version, "served": True, "schema": {"openAPIV3Schema": schema}}
    condition = {"type": "Established", "status": established}
    return {"spec": {"versions": [served]}, "status": {"conditions": [condition]}}


def labelled(found: dict[str, Any], **labels: str) -> dict[str, Any]:
    found = copy.deepcopy(found)
    found["metadata"]["labels"] = {key.replace("__", "/"): text for key, text in labels.items()}
    return found


def deployment(ready: int = 1, version: str = "0.1.0") -> dict[str, Any]:
    found = named("op", spec={"replicas": 1}, status={"readyReplicas": ready})
    found["metadata"]["labels"] = {"app.kubernetes.io/version": version}
    return found


def lease(age_seconds: float = 1) -> dict[str, Any]:
    renewed = (NOW - timedelta(seconds=age_seconds)).isoformat()
    spec = {"holderIdentity": "op-1", "leaseDurationSeconds": 8, "renewTime": renewed}
    return named("op", spec=spec)


def members(ready: int) -> list[dict[str, Any]]:
    return [named("etcd", spec={"replicas": 3}, status={"readyReplicas": ready})]


def endpoints(service: str, count: int = 1) -> dict[str, Any]:
    found = named(service, endpoints=[{"conditions": {"ready": True}}] * count)
    found["metadata"]["labels"] = {"kubernetes.io/service-name": service}
    return found


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason}}
    return named("p", status={"containerStatuses": [{"image": "x:1", "state": state}]})


def mounting(claim: str) -> dict[str, Any]:
    volume = {"persistentVolumeClaim": {"claimName": claim}}
    return named("job", "team", spec={"template": {"spec": {"volumes": [volume]}}})


DEFAULT_CLASS = named("fast")
DEFAULT_CLASS["metadata"]["annotations"] = {"storageclass.kubernetes.io/is-default-class": "true"}
POLICY = named("p", kind="ValidatingAdmissionPolicy")
BINDING = named("p", kind="ValidatingAdmissionPolicyBinding")
CLAIM = named("data", "team", status={"phase": "Bound"})
FORBIDDEN = Unread("pods is forbidden", forbidden=True)
ABSENT = Unread("not found", absent=True)

GOOD = ClusterFacts(
    now=NOW,
    namespace="team",
    cli_version="0.1.0",
    schema_version="v1",
    schema_paths=frozenset(schema_paths(SCHEMA)),
    server={"gitVersion": "v1.33.1"},
    definition=definition(),
    deployments=[deployment()],
    lease=lease(),
    etcd_sets=members(3),
    etcd_health={"etcd-0": '{"health":"true","reason":""}'},
    certificates={"ca.crt": NOW + timedelta(days=300)},
    authority=named("etcd-authority"),
    services=[named("etcd")],
    slices=[endpoints("etcd")],
    dns=[endpoints("kube-dns", 2)],
    storage_classes=[DEFAULT_CLASS],
    claims=[CLAIM],
    jobs=[mounting("data")],
    policies=[POLICY, BINDING],
    pods=[waiting("ContainerCreating")],
    job_pods=[],
    access=dict.fromkeys(("get", "list", "create", "patch", "delete"), True),
    network_policies=[named("etcd")],
    daemon_sets=[named("calico-node")],
)


def troubles(**changed: Any) -> list[Finding]:
    found = cluster_findings(replace(GOOD, **changed))
    return [one for one in found if one.grade is not Grade.OK]


def test_good_cluster_has_only_good_findings() -> None:
    assert troubles() == []


WIDER = {"properties": {**SCHEMA["properties"], "new": {"type": "string"}}}


@pytest.mark.parametrize(
    ("changed", "check", "grade", "words"),
    [
        ({"server": {"gitVersion": "v1.28.4"}}, "API server", Grade.FAIL, "v1.28.4"),
        ({"server": {"gitVersion": "v1.29.9+k3s1"}}, "API server", Grade.WARN, "v1.29.9"),
        ({"server": Unread("refused")}, "API server", Grade.FAIL, "refused"),
        ({"definition": ABSENT}, "CRD", Grade.FAIL, "not installed"),
        ({"definition": definition(version="v0")}, "CRD", Grade.FAIL, "only: v0"),
        ({"definition": definition(established="False")}, "CRD", Grade.FAIL, "established"),
        ({"definition": definition({})}, "CRD", Grade.FAIL, "its schema lacks spec: object"),
        ({"definition": definition(WIDER)}, "CRD", Grade.WARN, "also has new: string"),
        ({"deployments": []}, "operator", Grade.FAIL, "no Deployment"),
        ({"deployments": [deployment(0)]}, "operator", Grade.FAIL, "0 of 1"),
        ({"deployments": [deployment()] * 2}, "operator", Grade.WARN, "several"),
        ({"deployments": [deployment(version="9")]}, "versions", Grade.WARN, "operator 9"),
        ({"lease": lease(60)}, "leader", Grade.FAIL, "60 s ago"),
        ({"lease": named("op", spec={})}, "leader", Grade.FAIL, "active"),
        ({"lease": ABSENT}, "leader", Grade.FAIL, "active"),
        ({"etcd_sets": []}, "etcd", Grade.WARN, "no etcd"),
        ({"etcd_sets": members(2)}, "etcd", Grade.WARN, "2 of 3"),
        ({"etcd_sets": members(1)}, "etcd", Grade.FAIL, "majority"),
        ({"etcd_health": {"e": '{"health":"false"}'}}, "etcd e", Grade.FAIL, "false"),
        ({"etcd_health": {"e": FORBIDDEN}}, "etcd e", Grade.WARN, "not permitted"),
        ({"certificates": {"a": NOW}}, "certificates", Grade.FAIL, "a expired"),
        (
            {"certificates": {"a": NOW + timedelta(days=2), "b": NOW + timedelta(days=300)}},
            "certificates", Grade.WARN, "a is the first",
        ),
        ({"authority": ABSENT}, "authority", Grade.FAIL, "missing"),
        ({"slices": []}, "services", Grade.FAIL, "no endpoints: etcd"),
        ({"dns": []}, "DNS", Grade.WARN, "no ready endpoint"),
        ({"storage_classes": [named("slow")]}, "storage classes", Grade.WARN, "there is: slow"),
        (
            {"claims": [CLAIM, named("w", status={"phase": "Pending"})]},
            "claims", Grade.WARN, "sys/w",
        ),
        ({"jobs": [mounting("lost")]}, "claims of jobs", Grade.FAIL, "lost (of job)"),
        ({"policies": []}, "admission policies", Grade.WARN, "none"),
        ({"policies": [POLICY]}, "admission policies", Grade.WARN, "without binding: p"),
        ({"job_pods": [waiting("ErrImagePull")]}, "images", Grade.FAIL, "ErrImagePull: x:1"),
        ({"access": {"get": True, "list": True}}, "your permissions", Grade.WARN, "create"),
        ({"access": {}}, "your permissions", Grade.FAIL, "get, list"),
        ({"network_policies": []}, "network policies", Grade.WARN, "none"),
        ({"daemon_sets": [named("kube-flannel")]}, "network policies", Grade.WARN, "flannel"),
        ({"daemon_sets": FORBIDDEN}, "network policies", Grade.WARN, "no known network add-on"),
    ],
)  # fmt: skip
def test_trouble_is_found_with_a_remedy(
    changed: dict[str, Any], check: str, grade: Grade, words: str
) -> None:
    found = troubles(**changed)
    assert [(one.check, one.grade) for one in found] == [(check, grade)]
    assert words in found[0].found
    assert found[0].remedy


PLAIN = {"now", "namespace", "cli_version", "schema_version", "schema_paths", "extra"}
READ = {one.name for one in fields(ClusterFacts)} - PLAIN - {"server", "etcd_health"}


@pytest.mark.parametrize("name", sorted(READ))
def test_missing_permission_is_a_warning(name: str) -> None:
    found = troubles(**{name: FORBIDDEN})
    assert len(found) == 1
    assert found[0].grade is Grade.WARN
    told = found[0].found
    assert "not permitted" in told or name == "daemon_sets"


def test_external_etcd_is_named_and_not_reached() -> None:
    external: dict[str, Any] = {
        "etcd_sets": [],
        "extra": {"endpoints": "https://etcd.example:2379"},
    }
    assert troubles(**external) == []
    found = cluster_findings(replace(GOOD, **external))
    assert any("https://etcd.example:2379" in one.found for one in found)
