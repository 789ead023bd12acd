"""Manifest errors reported by the API server itself, with the path of the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.integration.apiserver import ApiServer, Refused
from tests.integration.kube_helpers import ELASTICJOBS_PATH, Json, elasticjob

TRAINER = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
ETCD = "https://etcd.example:2379"


def containers(*found: Json, **pod: Any) -> Json:
    return {"template": {"spec": {"containers": list(found)} | pod}}


def without(document: Json, *steps: str) -> Json:
    """Return a copy without the field at the end of these steps."""
    result = copy.deepcopy(document)
    found = result
    for step in steps[:-1]:
        found = found[step]
    del found[steps[-1]]
    return result


INVALID: dict[str, tuple[Json, str, str]] = {
    # name: manifest, path of the field, words of the message
    "no spec": (without(elasticjob(), "spec"), "spec", "Required value"),
    "no maxNodes": (without(elasticjob(), "spec", "maxNodes"), "spec.maxNodes", "Required"),
    "no template": (without(elasticjob(), "spec", "template"), "spec.template", "Required"),
    "maxNodes below minNodes": (
        elasticjob(minNodes=5, maxNodes=4),
        "spec.maxNodes",
        "must be at least minNodes",
    ),
    "no nodes at all": (elasticjob(minNodes=0), "spec.minNodes", "greater than or equal to 1"),
    "negative nodes": (elasticjob(nodes=-1), "spec.nodes", "greater than or equal to 0"),
    "nodes in words": (elasticjob(maxNodes="four"), "spec.maxNodes", "must be of type integer"),
    "increment of nothing": (
        elasticjob(nodeIncrement=0),
        "spec.nodeIncrement",
        "greater than or equal to 1",
    ),
    "no workers": (
        elasticjob(nprocPerNode=0),
        "spec.nprocPerNode",
        "must be auto, gpu, cpu or an integer from 1 to 1024",
    ),
    "workers in words": (
        elasticjob(nprocPerNode="all"),
        "spec.nprocPerNode",
        "must be auto, gpu, cpu or an integer from 1 to 1024",
    ),
    "workers in upper case": (
        elasticjob(nprocPerNode="GPU"),
        "spec.nprocPerNode",
        "must be auto, gpu, cpu or an integer from 1 to 1024",
    ),
    "no workers, in quotes": (
        elasticjob(nprocPerNode="0"),
        "spec.nprocPerNode",
        "must be auto, gpu, cpu or an integer from 1 to 1024",
    ),
    "too many workers": (
        elasticjob(nprocPerNode="1025"),
        "spec.nprocPerNode",
        "must be auto, gpu, cpu or an integer from 1 to 1024",
    ),
    "negative restarts": (
        elasticjob(maxRestarts=-1),
        "spec.maxRestarts",
        "greater than or equal to 0",
    ),
    "more than a 32-bit number": (
        elasticjob(maxRestarts=2**31),
        "spec.maxRestarts",
        "less than or equal to 2147483647",
    ),
    "a name too long for its pods": (elasticjob("j" * 56), "metadata.name", "55"),
    "a name that is no DNS label": (elasticjob("my.job"), "metadata.name", "should match"),
    "no containers": (elasticjob(**containers()), "spec.template.spec.containers", "at least 1"),
    "a container without a name": (
        elasticjob(**containers(without(TRAINER, "name"))),
        "spec.template.spec.containers[0].name",
        "Required",
    ),
    "a trainer without a command": (
        elasticjob(**containers(without(TRAINER, "command"))),
        "spec.template.spec.containers",
        "command must be set in the trainer container",
    ),
    "a trainer with a command and an entry point": (
        elasticjob(entrypoint=["python3", "train.py"]),
        "spec.entrypoint",
        "must be absent if the trainer container has a command",
    ),
    "a setup without a program": (
        elasticjob(setup=["", "x"]),
        "spec.setup",
        "must begin with a program",
    ),
    "an unknown launch": (
        elasticjob(launch="PerPod"),
        "spec.launch",
        'supported values: "Auto", "PerWorker", "PerNode"',
    ),
    "two containers and no trainer": (
        elasticjob(**containers(TRAINER, TRAINER | {"name": "logger"})),
        "spec.trainer",
        "must be set when the template has more than one container",
    ),
    "a trainer that is not there": (
        elasticjob(trainer="coach"),
        "spec.trainer",
        "must be the name of one of the template's containers",
    ),
    "one name for two containers": (
        elasticjob(trainer="trainer", **containers(TRAINER, TRAINER)),
        "spec.template.spec.containers",
        "names must be unique",
    ),
    "one name for a container and an init container": (
        elasticjob(**containers(TRAINER, initContainers=[{"name": "trainer"}])),
        "spec.template.spec.containers",
        "names must be unique",
    ),
    "a name that the operator uses": (
        elasticjob(**containers(TRAINER, initContainers=[{"name": "elasticjob-agent"}])),
        "spec.template.spec.containers",
        "names must not be elasticjob-agent or elasticjob-launcher",
    ),
    "pods that restart by themselves": (
        elasticjob(**containers(TRAINER, restartPolicy="OnFailure")),
        "spec.template.spec.restartPolicy",
        'supported values: "Never"',
    ),
    "an unknown backend": (
        elasticjob(rendezvous={"backend": "zookeeper"}),
        "spec.rendezvous.backend",
        'supported values: "Etcd", "EtcdV2", "C10d"',
    ),
    "an endpoint without a port": (
        elasticjob(rendezvous={"endpoints": ["https://etcd.example"]}),
        "spec.rendezvous.endpoints[0]",
        "should match",
    ),
    "an endpoint twice": (
        elasticjob(rendezvous={"endpoints": [ETCD, ETCD]}),
        "spec.rendezvous.endpoints",
        "must not repeat an endpoint",
    ),
    "two hosts of one store": (
        elasticjob(rendezvous={"backend": "C10d", "endpoints": ["a:1", "b:1"]}),
        "spec.rendezvous.endpoints",
        "must hold at most one endpoint for backend C10d",
    ),
    "sizes that the backend does not know": (
        elasticjob(rendezvous={"backend": "C10d"}, nodeIncrement=2),
        "spec.nodeIncrement",
        "must be 1 unless rendezvous.backend is Etcd",
    ),
    "a Secret for the operator's own etcd": (
        elasticjob(rendezvous={"secretName": "mine"}),
        "spec.rendezvous.secretName",
        "must be absent unless endpoints of etcd are given",
    ),
    "a lease that etcd does not grant": (
        elasticjob(rendezvous={"keepAliveSeconds": 1}),
        "spec.rendezvous.keepAliveSeconds",
        "greater than or equal to 2",
    ),
    "an end before the beginning": (
        elasticjob(rendezvous={"joinTimeoutSeconds": 10, "lastCallSeconds": 20}),
        "spec.rendezvous.joinTimeoutSeconds",
        "must be at least lastCallSeconds",
    ),
    "a strange way to grow": (
        elasticjob(elasticity={"scaleUp": "Sometimes"}),
        "spec.elasticity.scaleUp",
        'supported values: "Immediate", "AfterCheckpoint"',
    ),
    "warm start as YAML's boolean": (
        elasticjob(recovery={"warmStart": False}),
        "spec.recovery.warmStart",
        "must be of type string",
    ),
    "a module that is none": (
        elasticjob(recovery={"warmStartModules": ["not-a-module"]}),
        "spec.recovery.warmStartModules[0]",
        "should match",
    ),
    "two intervals of snapshots": (
        elasticjob(recovery={"snapshots": {"everySteps": 1, "intervalSeconds": 9}}),
        "spec.recovery.snapshots.everySteps",
        "must be absent if intervalSeconds is given",
    ),
    "a storage for snapshots without a place": (
        elasticjob(recovery={"snapshots": {"storage": {"keep": 3}}}),
        "spec.recovery.snapshots.storage",
        "must have either claim or path",
    ),
    "a storage for snapshots in two places": (
        elasticjob(recovery={"snapshots": {"storage": {"claim": "c", "path": "/data"}}}),
        "spec.recovery.snapshots.storage",
        "must have either claim or path",
    ),
    "a fraction of memory for snapshots": (
        elasticjob(recovery={"snapshots": {"memoryLimit": "1.5Gi"}}),
        "spec.recovery.snapshots.memoryLimit",
        "should match",
    ),
    "a deadline of nothing": (
        elasticjob(runPolicy={"activeDeadlineSeconds": 0}),
        "spec.runPolicy.activeDeadlineSeconds",
        "greater than or equal to 1",
    ),
    "an unknown clean-up": (
        elasticjob(runPolicy={"cleanPodPolicy": "Some"}),
        "spec.runPolicy.cleanPodPolicy",
        'supported values: "None", "Running", "All"',
    ),
    "a gang that nothing schedules": (
        elasticjob(runPolicy={"schedulingPolicy": {"minAvailable": 2}}),
        "spec.runPolicy.schedulingPolicy.minAvailable",
        "must be absent: nothing acts on it",
    ),
    "a queue that nothing reads": (
        elasticjob(runPolicy={"schedulingPolicy": {"queue": "research", "priorityClass": "high"}}),
        "spec.runPolicy.schedulingPolicy.queue",
        "must be absent: nothing acts on it",
    ),
}


@pytest.mark.parametrize(("manifest", "field", "words"), INVALID.values(), ids=INVALID)
def test_invalid_manifest_is_refused_with_field_path(
    api_server: ApiServer, manifest: Json, field: str, words: str
) -> None:
    with pytest.raises(Refused) as refused:
        api_server.request("POST", ELASTICJOBS_PATH.format("default"), manifest)
    assert refused.value.status == 422
    causes = refused.value.body["details"]["causes"]
    said = [cause["message"] for cause in causes if cause["field"] == field]
    assert any(words in message for message in said), refused.value
    assert f"{field}: " in refused.value.body["message"], "as kubectl shows it"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"maxnodes": 8}, "spec.maxnodes"),
        ({"rendezvous": {"keepAlive": 5}}, "spec.rendezvous.keepAlive"),
        ({"runPolicy": {"suspended": True}}, "spec.runPolicy.suspended"),
    ],
)
def test_unknown_field_is_refused_with_strict_validation(
    api_server: ApiServer, spec: Json, field: str
) -> None:
    path = ELASTICJOBS_PATH.format("default")
    with pytest.raises(Refused, match=f'strict decoding error: unknown field "{field}"'):
        api_server.request("POST", f"{path}?fieldValidation=Strict", elasticjob(**spec))


def test_template_typo_is_refused_with_strict_validation(
    api_server: ApiServer, namespace: str
) -> None:
    typo = TRAINER | {"imagePullPolice": "Always"}
    path = ELASTICJOBS_PATH.format(namespace)
    manifest = elasticjob(**containers(typo, hostNetwrok=True))
    with pytest.raises(Refused) as refused:
        api_server.request("POST", f"{path}?fieldValidation=Strict", manifest)
    assert refused.value.status == 400
    said = refused.value.body["message"]
    assert 'unknown field "spec.template.spec.containers[0].imagePullPolice"' in said
    assert 'unknown field "spec.template.spec.hostNetwrok"' in said


def test_template_typo_is_dropped_with_a_warning_without_strict_validation(
    api_server: ApiServer, namespace: str
) -> None:
    path = ELASTICJOBS_PATH.format(namespace)
    manifest = elasticjob(**containers(TRAINER, hostNetwrok=True))
    kept, warnings = api_server.warned("POST", path, manifest)
    assert kept["spec"]["template"] == {"spec": {"containers": [TRAINER]}}
    assert any('unknown field "spec.template.spec.hostNetwrok"' in one for one in warnings)


TEMPLATE_FAULTS: dict[str, tuple[Json, str]] = {
    "type": (containers(TRAINER, hostNetwork="true"), "hostNetwork"),
    "enumeration": (
        containers(TRAINER | {"imagePullPolicy": "Alway"}),
        "containers[0].imagePullPolicy",
    ),
    "quantity": (
        containers(TRAINER | {"resources": {"limits": {"cpu": "1 core"}}}),
        "containers[0].resources.limits.cpu",
    ),
    "required field": (
        containers(TRAINER | {"ports": [{"name": "web"}]}),
        "containers[0].ports[0].containerPort",
    ),
    "duplicate": (
        containers(TRAINER | {"env": [{"name": "A"}, {"name": "A"}]}),
        "containers[0].env[1]",
    ),
}


@pytest.mark.parametrize(("spec", "field"), TEMPLATE_FAULTS.values(), ids=TEMPLATE_FAULTS)
def test_template_fault_is_refused_with_the_job(
    api_server: ApiServer, namespace: str, spec: Json, field: str
) -> None:
    with pytest.raises(Refused) as refused:
        api_server.request("POST", ELASTICJOBS_PATH.format(namespace), elasticjob(**spec))
    assert refused.value.status == 422
    found = [cause["field"] for cause in refused.value.body["details"]["causes"]]
    assert f"spec.template.spec.{field}" in found


def test_at_least_twenty_fields_are_covered() -> None:
    assert len(INVALID) >= 20
    assert len({field for _, field, _ in INVALID.values()}) >= 20
