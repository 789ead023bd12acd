"""Verdicts of `elasticjob validate` on pod templates, compared with those of a real API server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from elasticjob_operator.domain.manifests import pod
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.manifests.template_check import check_pods
from elasticjob_operator.model import InvalidManifest, parse_manifest
from elasticjob_operator.model.parse import parse_strictly
from tests.integration.apiserver import ApiServer, Refused
from tests.integration.etcd_server import wait_until
from tests.integration.kube_helpers import ELASTICJOBS_PATH
from tests.integration.kubernetes.template_table import CASES

Json = dict[str, Any]
TRAINER = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
_KEY = re.compile(r"\[([^\]]*[^\]\d][^\]]*)\]")


def manifest(case: Json, namespace: str = "default") -> Json:
    own = {**TRAINER, **case.get("trainer", {})}
    spec = dict(case.get("spec", {}))
    template: Json = {"spec": {**spec, "containers": [own, *spec.get("containers", ())]}}
    if "metadata" in case:
        template["metadata"] = case["metadata"]
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "digits", "namespace": namespace, "uid": "a-uid"},
        "spec": {"maxNodes": 4, "nodes": 4, "trainer": "trainer", "template": template},
    }


def ours(document: Json) -> list[str]:
    """Return the paths that validation finds."""
    try:
        parse_strictly(document, check_pods)
    except InvalidManifest as error:
        return [problem.path for problem in error.problems]
    return []


def fields_of(refused: Refused) -> list[str]:
    """Return the fields that a refusal names."""
    if refused.status == 400 or "details" not in refused.body:
        return _UNKNOWN.findall(str(refused)) or [str(refused)]
    causes = refused.body["details"].get("causes", ())
    return [cause["field"] for cause in causes if cause["field"] != "<nil>"] or [str(refused)]


def theirs(api_server: ApiServer, document: Json) -> list[str]:
    """Return the fields at which the API server refuses the job, or else its first pod."""
    namespace = document["metadata"]["namespace"]
    options = "?dryRun=All&fieldValidation=Strict"
    stored = {**document, "metadata": {"name": "digits", "namespace": namespace}}
    try:
        kept = api_server.request("POST", ELASTICJOBS_PATH.format(namespace) + options, stored)
    except Refused as refused:
        return fields_of(refused)
    job = parse_manifest(kept)
    body = pod.pod(job, 0, 0, PodSettings("sidecar:1"), Access(b"k" * 32, None, None, None))
    try:
        api_server.request("POST", f"/api/v1/namespaces/{namespace}/pods{options}", body)
    except Refused as refused:
        return [in_template(field) for field in fields_of(refused)]
    return []


def in_template(field: str) -> str:
    """Return the path in the job of a pod's field: the launcher is the first init container."""
    shifted = re.sub(
        r"^spec\.initContainers\[(\d+)\]",
        lambda match: f"spec.initContainers[{int(match[1]) - 1}]",
        field,
    )
    return f"spec.template.{shifted}"


def plain(path: str) -> str:
    """Return a path with keys of maps in one spelling: `limits[cpu]` and `limits.cpu` are one."""
    return _KEY.sub(lambda match: "." + match[1].strip('"'), path)


OTHER_PATHS = {
    # The API server leaves out an index, or names another field or none at all.
    "mount above its volume": "spec.containers[0].volumeMounts[0].subPathExpr",
    "part of a volume with steps back": "spec.containers[0].volumeMounts[0].subPath",
    "part of a pod's metadata": "spec.volumes[0].downwardAPI.items[0].fieldRef.fieldPath",
    "stop signal of another system": "spec.os.name",
    "bidirectional mount": "spec.containers[0].volumeMounts[0].mountPropagation",
    "mapping instead of list": "spec.containers[0].ports",
    "integer out of range": "spec.containers[0].ports[0].containerPort",
    "claim template without a size": (
        "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.resources.requests.storage"
    ),
    "host users": "spec.hostPID",
    "host processes": "spec.shareProcessNamespace",
    "priority": "spec.priority",
    "preemption policy without a class": "spec.preemptionPolicy",
    "overhead without a class": "spec.overhead",
}
"""Path that validation gives, where that of the API server differs."""


def agree(name: str, found: list[str], expected: list[str]) -> bool:
    """Return True if both verdicts are the same, and each of the API server's fields is named."""
    if not found or not expected:
        return found == expected
    if name in OTHER_PATHS:
        return found == [f"spec.template.{OTHER_PATHS[name]}"]
    # The API server repeats a faulty limit as the request that is absent.
    fields = {plain(field) for field in expected}
    limits = {field for field in fields if ".limits." in field}
    fields -= {field.replace(".limits.", ".requests.") for field in limits}
    return all(any(plain(path).startswith(field) for path in found) for field in fields)


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_validation_agrees_with_api_server(api_server: ApiServer, name: str, case: Json) -> None:
    document = manifest(case)
    found, expected = ours(document), theirs(api_server, document)
    assert agree(name, found, expected), (found, expected)


@pytest.mark.parametrize("fields", [{"preemptionPolicy": "Never"}, {"priority": 10}])
@pytest.mark.parametrize("policy", [True, False], ids=["run policy", "template"])
def test_fields_of_a_named_priority_class_are_accepted(
    api_server: ApiServer, namespace: str, fields: Json, policy: bool
) -> None:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    polite = {"metadata": {"name": "polite"}, "value": 10, "preemptionPolicy": "Never"}
    named = {} if policy else {"priorityClassName": "polite"}
    document = manifest({"spec": {**fields, **named}}, namespace)
    if policy:
        document["spec"]["runPolicy"] = {"schedulingPolicy": {"priorityClass": "polite"}}
    api_server.request("POST", classes, polite)
    try:
        wait_until(lambda: theirs(api_server, document) == [], "the priority class")
    finally:
        api_server.request("DELETE", f"{classes}/polite")
    assert ours(document) == []


def test_many_templates_of_either_verdict_are_compared() -> None:
    accepted = [name for name, case in CASES.items() if not ours(manifest(case))]
    assert len(accepted) >= 30
    assert len(CASES) - len(accepted) >= 100
