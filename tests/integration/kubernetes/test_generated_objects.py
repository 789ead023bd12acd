"""Generated pods and owned objects, on a real API server: accepted field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.manifests import owned_objects, pod
from elasticjob_operator.domain.manifests.owned_objects import Access, access_in
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.manifests.resource_refusals import refuses_added_resources
from elasticjob_operator.model import ElasticJob, parse_manifest
from tests.integration.apiserver import ApiServer, Refused

Json = dict[str, Any]
SETTINGS = PodSettings("sidecar:1", pull_secrets=("pull",), endpoints=("http://etcd:2379",))
LIMITED = replace(SETTINGS, always_limited=True)
ACCESS = Access(b"k" * 32, b"ca", "job-uid", "secret", b"cert", b"key")
TRAINER = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def job_of(namespace: str, spec: Json | None = None, trainer: Json | None = None) -> ElasticJob:
    template = {"spec": {"containers": [{**TRAINER, **(trainer or {})}], **(spec or {})}}
    return parse_manifest(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "digits", "namespace": namespace, "uid": "a-uid"},
            "spec": {"maxNodes": 4, "nodes": 4, "trainer": "trainer", "template": template},
        }
    )


def created(
    api_server: ApiServer, job: ElasticJob, index: int = 0, settings: PodSettings = SETTINGS
) -> Json:
    """Create the pod and return it as stored: a field unknown to the API server is an error."""
    body = pod.pod(job, index, 0, settings, ACCESS)
    return post(api_server, f"/api/v1/namespaces/{job.metadata.namespace}/pods", body)


def post(api_server: ApiServer, path: str, body: Json) -> Json:
    return api_server.request("POST", f"{path}?fieldValidation=Strict", body)


def label(api_server: ApiServer, namespace: str, level: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    api_server.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})


FULL: Json = {
    "containers": [
        {"name": "board", "image": "board:1", "ports": [{"containerPort": 6006}]},
        {
            **TRAINER,
            "args": ["--lr", "$(LR)"],
            "env": [{"name": "LR", "value": "0.1"}],
            "resources": {"limits": {"cpu": 2, "memory": "1Gi", "ephemeral-storage": "1Gi"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "lifecycle": {"preStop": {"exec": {"command": ["sync"]}}},
            "terminationMessagePath": "/tmp/end",
        },
    ],
    "initContainers": [
        {"name": "fetch", "image": "fetch:1"},
        {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"},
    ],
    "volumes": [{"name": "data", "emptyDir": {}}],
    "imagePullSecrets": [{"name": "mine"}],
    "automountServiceAccountToken": True,
    "shareProcessNamespace": True,
    "securityContext": {"runAsUser": 0, "fsGroup": 5},
    "terminationGracePeriodSeconds": 90,
}


@pytest.mark.parametrize("spec", [{}, FULL, {"hostNetwork": True}, {"hostUsers": False}])
def test_pods_are_stored_exactly_as_generated(
    api_server: ApiServer, namespace: str, spec: Json
) -> None:
    sent = pod.pod(job_of(namespace, spec), 0, 0, SETTINGS, ACCESS)
    kept = created(api_server, job_of(namespace, spec))
    for kind in ("initContainers", "containers"):
        names = [one["name"] for one in kept["spec"][kind]]
        assert names == [one["name"] for one in sent["spec"][kind]]
    volumes = [one["name"] for one in kept["spec"]["volumes"]]
    assert volumes == [one["name"] for one in sent["spec"]["volumes"]]


def test_restricted_namespace_admits_generated_pods(api_server: ApiServer, namespace: str) -> None:
    label(api_server, namespace, "restricted")
    created(api_server, job_of(namespace, trainer={"securityContext": CONFINED}))
    with pytest.raises(Refused) as refused:
        created(api_server, job_of(namespace), index=1)
    said = str(refused.value)
    assert 'container "trainer"' in said
    assert "elasticjob-" not in said, "only the user's own container is in the way"


def test_quota_counts_and_admits_generated_pods(api_server: ApiServer, namespace: str) -> None:
    amounts = ["requests.cpu", "limits.cpu", "requests.memory", "limits.memory"]
    hard = {name: "4Gi" if "memory" in name else "4" for name in amounts}
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    post(api_server, quotas, {"metadata": {"name": "all"}, "spec": {"hard": hard}})
    used = dict.fromkeys(amounts, "0")
    # There is no controller to compute the first usage.
    api_server.patch(f"{quotas}/all/status", {"status": {"hard": hard, "used": used}})
    resources = {"limits": {"cpu": "1", "memory": "1Gi"}}
    created(api_server, job_of(namespace, trainer={"resources": resources}))
    counted = api_server.request("GET", f"{quotas}/all")["status"]["used"]
    assert counted["limits.cpu"] == counted["requests.cpu"] == "1500m"
    assert counted["limits.memory"] == counted["requests.memory"] == "1152Mi"
    with pytest.raises(Refused, match="must specify"):
        created(api_server, job_of(namespace), index=1)
    burstable = job_of(namespace, trainer={"resources": resources | {"requests": {"cpu": "500m"}}})
    with pytest.raises(Refused, match=r"must specify limits\.cpu for: elasticjob-agent"):
        created(api_server, burstable, index=1)
    created(api_server, burstable, index=1, settings=LIMITED)
    counted = api_server.request("GET", f"{quotas}/all")["status"]["used"]
    assert (counted["requests.cpu"], counted["limits.cpu"]) == ("2500m", "3")


def test_limit_range_defaults_keep_quality_of_service_class(
    api_server: ApiServer, namespace: str
) -> None:
    amounts = {"cpu": "1", "memory": "1Gi"}
    limit = {
        "type": "Container",
        "default": amounts,
        "defaultRequest": amounts,
        "min": {"cpu": "100m"},
    }
    ranges = f"/api/v1/namespaces/{namespace}/limitranges"
    post(api_server, ranges, {"metadata": {"name": "all"}, "spec": {"limits": [limit]}})
    kept = created(api_server, job_of(namespace), settings=LIMITED)
    assert kept["status"]["qosClass"] == "Guaranteed"
    with pytest.raises(Refused, match="minimum cpu usage per Container is 100m"):
        created(api_server, job_of(namespace), index=1)
    larger = replace(SETTINGS, cpu="100m")
    kept = created(api_server, job_of(namespace), index=1, settings=larger)
    assert kept["status"]["qosClass"] == "Burstable"


MIB_32, GIB_1 = {"memory": "32Mi"}, {"memory": "1Gi"}
MIB_100, GIB_4 = {"memory": "100Mi"}, {"memory": "4Gi"}
RATIO = {"maxLimitRequestRatio": {"memory": "2"}}


@pytest.mark.parametrize(
    ("limit", "resources", "settings", "only_added"),
    [
        ({"max": MIB_32}, {}, SETTINGS, True),
        ({"max": MIB_32}, {}, LIMITED, True),
        ({"max": {"cpu": "20m"}}, {}, SETTINGS, True),
        ({"default": MIB_32}, {}, SETTINGS, True),
        ({"min": MIB_100}, {"requests": GIB_1}, SETTINGS, True),
        ({"min": MIB_100}, {"limits": GIB_1}, SETTINGS, True),
        ({"type": "Pod", "max": GIB_1}, {"limits": GIB_1}, LIMITED, True),
        (RATIO | {"default": GIB_1}, {"limits": GIB_1}, SETTINGS, True),
        ({"max": MIB_32}, {"limits": GIB_1}, LIMITED, False),
        ({"max": MIB_32}, {"requests": GIB_1}, SETTINGS, False),
        ({"max": MIB_100}, {"limits": GIB_1}, SETTINGS, False),
        ({"min": MIB_100}, {"requests": {"memory": "64Mi"}}, SETTINGS, False),
        ({"type": "Pod", "max": GIB_1}, {"limits": GIB_4}, LIMITED, False),
        ({"type": "Pod", "min": GIB_4}, {}, LIMITED, False),
        (RATIO | {"default": GIB_1}, {"requests": MIB_100, "limits": GIB_1}, LIMITED, False),
        ({}, {"limits": {"memory": "much"}}, SETTINGS, False),
    ],
)  # fmt: skip
def test_refusal_of_added_resources_alone_is_recognized(
    api_server: ApiServer,
    namespace: str,
    limit: Json,
    resources: Json,
    settings: PodSettings,
    only_added: bool,
) -> None:
    ranges = f"/api/v1/namespaces/{namespace}/limitranges"
    limits = [{"type": "Container", **limit}]
    post(api_server, ranges, {"metadata": {"name": "all"}, "spec": {"limits": limits}})
    body = pod.pod(job_of(namespace, trainer={"resources": resources}), 0, 0, settings, ACCESS)
    with pytest.raises(Refused) as refused:
        post(api_server, f"/api/v1/namespaces/{namespace}/pods", body)
    details = refused.value.body
    causes = (details.get("details") or {}).get("causes") or ()
    fields = [cause["field"] for cause in causes]
    assert refuses_added_resources(body, details["message"], fields) is only_added, details


WHOLE = {"limits": {"cpu": "1", "memory": "1Gi"}}
EQUAL = {"limits": {"cpu": "1000m", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1024Mi"}}
LESS = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}


@pytest.mark.parametrize(
    ("spec", "resources", "quality"),
    [
        ({}, WHOLE, "Guaranteed"),
        ({}, EQUAL, "Guaranteed"),
        ({"initContainers": [{"name": "i", "image": "i:1", "resources": WHOLE}]}, WHOLE,
         "Guaranteed"),
        ({"initContainers": [{"name": "i", "image": "i:1"}]}, WHOLE, "Burstable"),
        ({}, LESS, "Burstable"),
        ({}, {}, "Burstable"),
        ({"resources": WHOLE}, WHOLE, "Guaranteed"),
        ({"resources": WHOLE}, {}, "Guaranteed"),
        ({"resources": LESS}, {"requests": {"cpu": "500m"}}, "Burstable"),
        ({"resources": {"requests": {"cpu": "1"}}}, {"requests": {"cpu": "1"}}, "Burstable"),
    ],
)  # fmt: skip
def test_pod_has_the_quality_of_service_class_of_its_template(
    api_server: ApiServer, namespace: str, spec: Json, resources: Json, quality: str
) -> None:
    made = job_of(namespace, spec, {"resources": resources})
    for index, settings in enumerate((SETTINGS, LIMITED)):
        kept = created(api_server, made, index=index, settings=settings)
        assert kept["status"]["qosClass"] == quality


def test_meshes_and_shared_memory_are_stored_as_generated(
    api_server: ApiServer, namespace: str
) -> None:
    nested = {"volumeMounts": [{"name": "nccl", "mountPath": "/dev/shm/nccl"}]}
    volumes = {"volumes": [{"name": "nccl", "emptyDir": {}}]}
    kept = created(api_server, job_of(namespace, volumes, nested))
    assert kept["metadata"]["labels"]["istio.io/dataplane-mode"] == "none"
    (trainer,) = kept["spec"]["containers"]
    paths = [one["mountPath"] for one in trainer["volumeMounts"]]
    assert {"/dev/shm", "/dev/shm/nccl"} <= set(paths)
    kept = created(api_server, job_of(namespace, {"hostIPC": True}), index=1)
    assert kept["spec"]["hostIPC"] is True
    (trainer,) = kept["spec"]["containers"]
    assert "/dev/shm" not in [one["mountPath"] for one in trainer["volumeMounts"]]


def test_other_owned_objects_are_accepted(api_server: ApiServer, namespace: str) -> None:
    job = job_of(namespace)
    core, policy = f"/api/v1/namespaces/{namespace}", f"/apis/policy/v1/namespaces/{namespace}"
    service = post(api_server, f"{core}/services", owned_objects.service(job))
    assert service["spec"]["clusterIP"] == "None"
    budget = post(api_server, f"{policy}/poddisruptionbudgets", owned_objects.budget(job, 3))
    assert budget["spec"]["minAvailable"] == 3
    secret = post(api_server, f"{core}/secrets", owned_objects.secret(job, ACCESS, {}))
    assert access_in(secret) == ACCESS
    for kept in (service, budget, secret):
        assert owned_objects.is_owned(job, kept)
