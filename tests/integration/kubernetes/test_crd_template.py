"""Pod template in ElasticJobs on a real API server: schema, immutability, server-side apply."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import pytest

from bench.processes import processor_seconds
from elasticjob_operator.model.template_schema import SCHEMA_FILE
from scripts.template_schema import OPENAPI_PATH, render
from tests.cluster.programs import programs
from tests.integration.apiserver import ApiServer, Refused
from tests.integration.etcd_server import wait_until
from tests.integration.kube_helpers import ELASTICJOBS_PATH, Json, elasticjob

APPLY = "application/apply-patch+yaml"


@pytest.fixture
def path(namespace: str) -> str:
    """Return the path of the ElasticJobs in the test's namespace."""
    return ELASTICJOBS_PATH.format(namespace)


def kubectl(server: ApiServer, *arguments: str) -> str:
    command = [str(programs("kubernetes") / "kubectl"), "--kubeconfig", str(server.kubeconfig())]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_template_schema_is_that_of_the_pinned_kubernetes(api_server: ApiServer) -> None:
    openapi = json.loads(api_server.fetch("GET", OPENAPI_PATH))
    assert SCHEMA_FILE.read_text() == render(openapi), "run `make template-schema`"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("spec", ("tolerations\t<[]Object>", "hostNetwork\t<boolean>")),
        ("spec.containers", ("volumeMounts\t<[]Object>", "imagePullPolicy\t<string>", "enum: ")),
        ("spec.containers.env.valueFrom", ("secretKeyRef", "fieldRef")),
        ("spec.affinity.nodeAffinity", ("requiredDuringSchedulingIgnoredDuringExecution",)),
    ],
)
def test_kubectl_explains_fields_of_the_template(
    api_server: ApiServer, field: str, words: tuple[str, ...]
) -> None:
    wait_until(lambda: is_described(api_server), "the description of ElasticJobs")
    said = kubectl(api_server, "explain", f"elasticjob.spec.template.{field}")
    for word in words:
        assert word in said


def is_described(server: ApiServer) -> bool:
    """Return True if the server has published the schema, some seconds after the definition."""
    group = ELASTICJOBS_PATH.partition("/namespaces")[0]
    try:
        return b"/elasticjobs/{name}" in server.fetch("GET", f"/openapi/v3{group}")
    except Refused:
        return False


# --- immutability

TWO_VARIABLES = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}]
TWO_STEPS = [{"name": "fetch", "image": "a:1"}, {"name": "unpack", "image": "a:1"}]
MANY_VARIABLES = [{"name": f"V{number}", "value": "1"} for number in range(70)]
ONE_VOLUME = {"name": "data", "emptyDir": {}}
BEFORE_AND_AFTER: dict[str, tuple[Json, Json, Json, Json]] = {
    # fields of the pod's spec and of the trainer, before and after
    "pod field by another": ({"nodeSelector": {"a": "b"}}, {}, {"schedulerName": "b"}, {}),
    "field by another of the same value": ({"hostPID": True}, {}, {"hostIPC": True}, {}),
    "trainer field by another": (
        {"volumes": [ONE_VOLUME]},
        {"volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        {"volumes": [ONE_VOLUME]},
        {"envFrom": [{"secretRef": {"name": "s"}}]},
    ),
    "volume's source by another": (
        {"volumes": [{"name": "data", "hostPath": {"path": "/a"}}]},
        {},
        {"volumes": [{"name": "data", "nfs": {"server": "s", "path": "/a"}}]},
        {},
    ),
    "probe's action by another": (
        {},
        {"livenessProbe": {"tcpSocket": {"port": 1}}},
        {},
        {"livenessProbe": {"grpc": {"port": 1}}},
    ),
    "variable's source by another": (
        {},
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}}]},
        {},
        {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "k"}}}]},
    ),
    "order of variables": ({}, {"env": TWO_VARIABLES}, {}, {"env": TWO_VARIABLES[::-1]}),
    "order of late variables": (
        {},
        {"env": MANY_VARIABLES},
        {},
        {"env": [*MANY_VARIABLES[:68], *MANY_VARIABLES[:67:-1]]},
    ),
    "order of variables of an init container": (
        {"initContainers": [TWO_STEPS[0], TWO_STEPS[1] | {"env": TWO_VARIABLES}]},
        {},
        {"initContainers": [TWO_STEPS[0], TWO_STEPS[1] | {"env": TWO_VARIABLES[::-1]}]},
        {},
    ),
    "order of init containers": (
        {"initContainers": TWO_STEPS},
        {},
        {"initContainers": TWO_STEPS[::-1]},
        {},
    ),
    "added init container": ({}, {}, {"initContainers": TWO_STEPS}, {}),
    "removed field": ({"hostNetwork": True}, {}, {}, {}),
}


def job_of(spec: Json, trainer: Json) -> Json:
    document = elasticjob()
    template = document["spec"]["template"]["spec"]
    template["containers"][0] |= copy.deepcopy(trainer)
    template |= copy.deepcopy(spec)
    return document


@pytest.mark.parametrize("case", BEFORE_AND_AFTER.values(), ids=BEFORE_AND_AFTER)
def test_template_of_running_job_does_not_change(
    api_server: ApiServer, path: str, case: tuple[Json, Json, Json, Json]
) -> None:
    kept = api_server.request("POST", path, job_of(*case[:2]))
    changed = job_of(*case[2:])
    changed["metadata"] = kept["metadata"]
    with pytest.raises(Refused, match="must change only while the job is suspended") as refused:
        api_server.request("PUT", f"{path}/job", changed)
    assert [cause["field"] for cause in refused.value.body["details"]["causes"]] == [
        "spec.template"
    ]
    suspended = api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": True}}})
    changed["metadata"] = suspended["metadata"]
    changed["spec"]["runPolicy"] = {"suspend": True}
    written = api_server.request("PUT", f"{path}/job", changed)
    assert written["spec"]["template"] == changed["spec"]["template"]


def test_write_of_a_status_takes_the_api_server_little_processor_time(
    api_server: ApiServer, namespace: str, path: str
) -> None:
    """Take the time of 15 writes of a ConfigMap, or of 83 if a rule visits unused indices."""
    document = job_of({}, {"env": MANY_VARIABLES[:20]})
    containers = document["spec"]["template"]["spec"]["containers"]
    document["spec"]["trainer"] = containers[0]["name"]
    containers += [containers[0] | {"name": f"helper-{number}"} for number in range(3)]
    api_server.request("POST", path, document)
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    api_server.request("POST", maps, {"metadata": {"name": "unit"}})

    assert api_server.process is not None
    pid = api_server.process.pid

    def seconds(path: str, field: str, writes: int) -> float:
        before = processor_seconds(pid)
        for number in range(writes):
            api_server.patch(path, {field: {"phase": ("Pending", "Running")[number % 2]}})
        return (processor_seconds(pid) - before) / writes

    assert seconds(f"{path}/job/status", "status", 40) < 36 * seconds(f"{maps}/unit", "data", 400)


# --- server-side apply


def apply(server: ApiServer, path: str, manager: str, document: Json) -> Json:
    options = f"?fieldManager={manager}&fieldValidation=Strict"
    return server.request("PATCH", f"{path}/job{options}", document, content_type=APPLY)


def suspended(**trainer: Any) -> Json:
    document = job_of({}, trainer)
    document["spec"]["runPolicy"] = {"suspend": True}
    return document


def part_of(container: Json) -> Json:
    """Return the fields of a second applier: it names a container and what it adds there."""
    document = elasticjob()
    document["spec"] = {"template": {"spec": {"containers": [container]}}}
    return document


def test_two_appliers_share_lists_of_a_template(api_server: ApiServer, path: str) -> None:
    variable = {"name": "LR", "value": "0.1"}
    apply(api_server, path, "author", suspended(env=[variable], ports=[{"containerPort": 80}]))
    token = {"name": "TOKEN", "value": "x"}
    added = {"name": "trainer", "env": [token], "ports": [{"containerPort": 81}]}
    apply(api_server, path, "platform", part_of(added))
    sidecar = {"name": "board", "image": "board:1"}
    pair = part_of(added)
    pair["spec"]["trainer"] = "trainer"
    pair["spec"]["template"]["spec"]["containers"].append(sidecar)
    found = apply(api_server, path, "platform", pair)["spec"]["template"]["spec"]["containers"]
    assert [one["name"] for one in found] == ["trainer", "board"]
    assert found[0]["env"] == [variable, token]
    assert [port["containerPort"] for port in found[0]["ports"]] == [80, 81]

    # Each removes only its own entries.
    left = apply(api_server, path, "platform", part_of({"name": "trainer"}))
    (trainer,) = left["spec"]["template"]["spec"]["containers"]
    assert trainer["env"] == [variable]
    assert [port["containerPort"] for port in trainer["ports"]] == [80]


def test_appliers_conflict_in_one_entry(api_server: ApiServer, path: str) -> None:
    apply(api_server, path, "author", suspended(env=[{"name": "LR", "value": "0.1"}]))
    other = part_of({"name": "trainer", "env": [{"name": "LR", "value": "0.2"}]})
    with pytest.raises(Refused) as refused:
        apply(api_server, path, "platform", other)
    assert refused.value.status == 409
    assert 'env[name="LR"].value' in str(refused.value)


def test_api_server_adds_nothing_to_a_template(api_server: ApiServer, path: str) -> None:
    spec: Json = {
        "volumes": [ONE_VOLUME, {"name": "c", "configMap": {"name": "c"}}],
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {},
    }
    trainer = {"livenessProbe": {"httpGet": {"port": 80}}, "resources": {"limits": {"cpu": 1}}}
    document = job_of(spec, trainer)
    kept = api_server.request("POST", path, document)
    assert kept["spec"]["template"] == document["spec"]["template"]
