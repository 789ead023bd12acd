"""Rules of the manifest: a valid one passes, each fault is named at its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticjob_operator.model import InvalidManifest, parse_manifest
from tests.unit.operator.builders import manifest

CONTAINERS = "spec.template.spec.containers"


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return a valid manifest with the value at a dotted path replaced; DELETE removes it."""
    document = manifest()
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    holder: Any = document
    for step in parents:
        holder = holder.setdefault(step, {}) if isinstance(holder, dict) else holder[int(step)]
    if value is DELETE:
        del holder[last]
    elif isinstance(holder, list) and last == len(holder):
        holder.append(value)
    else:
        holder[last] = value
    return document


DELETE = object()
C0 = "spec.template.spec.containers.0"
TRAINER = {"name": "trainer", "command": ["python3", "train.py"]}

INVALID: list[tuple[str, Any, str, str]] = [
    # changed path, new value, path of the problem, part of its message
    ("apiVersion", "v1", "apiVersion", "must be elasticjob.dev/v1alpha1"),
    ("apiVersion", DELETE, "apiVersion", "must be set"),
    ("kind", "PyTorchJob", "kind", "must be ElasticJob"),
    ("metadata", DELETE, "metadata", "must be set"),
    ("metadata.name", DELETE, "metadata.name", "must be set"),
    ("metadata.name", "", "metadata.name", "must not be empty"),
    ("metadata.name", "a" * 56, "metadata.name", "must be at most 55 characters"),
    ("metadata.name", "Job", "metadata.name", "must be a DNS label"),
    ("metadata.name", "a.b", "metadata.name", "must be a DNS label"),
    ("metadata.name", "a-", "metadata.name", "must be a DNS label"),
    ("metadata.name", "3d", "metadata.name", "a letter first"),
    ("metadata.name", "a\n", "metadata.name", "must be a DNS label"),
    ("metadata.labels", {"a": 1}, "metadata.labels.a", "put it in quotes"),
    ("spec", DELETE, "spec", "must be set"),
    ("spec", [], "spec", "must be a mapping"),
    ("spec.minNodes", 0, "spec.minNodes", "must be at least 1"),
    ("spec.minNodes", "1", "spec.minNodes", "leave out the quotes"),
    ("spec.minNodes", "\u00b2", "spec.minNodes", "must be an integer; got '\u00b2'"),
    ("spec.minNodes", 1.5, "spec.minNodes", "must be an integer"),
    ("spec.minNodes", True, "spec.minNodes", "must be an integer; got true"),
    ("spec.minNodes", 5, "spec.maxNodes", "must be at least minNodes"),
    ("spec.maxNodes", DELETE, "spec.maxNodes", "must be set"),
    ("spec.maxNodes", None, "spec.maxNodes", "must be set"),
    ("spec.maxNodes", 2**31, "spec.maxNodes", "must be at most 16384"),
    ("spec.maxNodes", 10**40, "spec.maxNodes", "must be at most 16384"),
    ("spec.minNodes", 16385, "spec.minNodes", "must be at most 16384; got 16385"),
    ("spec.nodes", 16385, "spec.nodes", "must be at most 16384; got 16385"),
    ("spec.setup", ["\ud800"], "spec.setup[0]", "must not contain an unpaired surrogate"),
    ("spec.nodeIncrement", 16385, "spec.nodeIncrement", "must be at most 16384; got 16385"),
    ("spec.setup", ["x" * 131_073], "spec.setup[0]", "must be at most 131072 characters long"),
    (
        "spec.runPolicy",
        {"activeDeadlineSeconds": 315_360_001},
        "spec.runPolicy.activeDeadlineSeconds",
        "must be at most 315360000",
    ),
    (
        "spec.template.metadata",
        {"labels": {f"k{number}": "" for number in range(257)}},
        "spec.template.metadata.labels",
        "must hold at most 256 entries",
    ),
    ("spec.nodes", -1, "spec.nodes", "must be at least 0"),
    ("spec.nodeIncrement", 0, "spec.nodeIncrement", "must be at least 1"),
    ("spec.nprocPerNode", 0, "spec.nprocPerNode", "must be auto, gpu, cpu or an integer"),
    ("spec.nprocPerNode", -8, "spec.nprocPerNode", "from 1 to 1024; got -8"),
    ("spec.nprocPerNode", 1025, "spec.nprocPerNode", "from 1 to 1024; got 1025"),
    ("spec.nprocPerNode", "1025", "spec.nprocPerNode", "from 1 to 1024; got '1025'"),
    ("spec.nprocPerNode", "0", "spec.nprocPerNode", "from 1 to 1024; got '0'"),
    ("spec.nprocPerNode", True, "spec.nprocPerNode", "from 1 to 1024; got true"),
    ("spec.nprocPerNode", "all", "spec.nprocPerNode", "from 1 to 1024; got 'all'"),
    ("spec.nprocPerNode", "GPU", "spec.nprocPerNode", "got 'GPU', did you mean gpu?"),
    ("spec.nprocPerNode", "cuda", "spec.nprocPerNode", "got 'cuda', did you mean gpu?"),
    ("spec.nprocPerNode", "Auto", "spec.nprocPerNode", "got 'Auto', did you mean auto?"),
    ("spec.nprocPerNode", "8x", "spec.nprocPerNode", "got '8x', did you mean 8?"),
    ("spec.nprocPerNode", " 8", "spec.nprocPerNode", "got ' 8', did you mean 8?"),
    ("spec.nprocPerNode", 8.0, "spec.nprocPerNode", "got 8.0, did you mean 8?"),
    ("spec.maxRestarts", -1, "spec.maxRestarts", "must be at least 0"),
    ("spec.maxNode", 4, "spec.maxNode", "did you mean maxNodes?"),
    ("spec.max_nodes", 4, "spec.max_nodes", "did you mean maxNodes?"),
    ("spec.NPROCPERNODE", 4, "spec.NPROCPERNODE", "did you mean nprocPerNode?"),
    ("spec.zzz", 4, "spec.zzz", "known fields are minNodes"),
    ("replicas", 4, "replicas", "must not be set"),
    ("spec.recovery", {"snapshots": []}, "spec.recovery.snapshots", "must be a mapping"),
    (
        "spec.recovery",
        {"snapshots": {"intervalSeconds": 86_401}},
        "spec.recovery.snapshots.intervalSeconds",
        "must be at most 86400",
    ),
    (
        "spec.recovery",
        {"snapshots": {"storage": {"claim": "c", "everySeconds": 86_401}}},
        "spec.recovery.snapshots.storage.everySeconds",
        "must be at most 86400",
    ),
    (
        "spec.recovery",
        {"snapshots": {"everySteps": 1, "intervalSeconds": 5}},
        "spec.recovery.snapshots.everySteps",
        "must be absent if intervalSeconds is given",
    ),
    *(
        (
            "spec.recovery",
            {"snapshots": {"storage": storage}},
            "spec.recovery.snapshots.storage",
            "must have either claim or path",
        )
        for storage in ({}, {"keep": 3}, {"claim": "c", "path": "/p"})
    ),
    *(
        (
            "spec.recovery",
            {"snapshots": {"memoryLimit": limit}},
            "spec.recovery.snapshots.memoryLimit",
            message,
        )
        for limit, message in (
            *(
                (text, "must be a whole number of bytes, or of k, M, G, T, Ki, Mi, Gi or Ti, such")
                for text in ("0", "-1Gi", "1.5Gi", "4 Gi", "much")
            ),
            (4, "must be a string; got 4: put it in quotes"),
        )
    ),
    *(
        (
            "spec.recovery",
            {"snapshots": {"storage": {"path": path}}},
            "spec.recovery.snapshots.storage.path",
            message,
        )
        for path, message in (
            ("relative", "must be an absolute path"),
            ("/", "must be at least 2 characters long; got '/'"),
            ("", "must not be empty"),
        )
    ),
    ("spec.trainer", "other", "spec.trainer", "must be the name of one of"),
    ("spec.trainer", "", "spec.trainer", "must not be empty"),
    ("spec.rendezvous.backend", "zookeeper", "spec.rendezvous.backend", "must be one of Etcd,"),
    ("spec.rendezvous.backend", "etcd", "spec.rendezvous.backend", "did you mean Etcd?"),
    ("spec.rendezvous.endpoints", "a:1", "spec.rendezvous.endpoints", "must be a list"),
    ("spec.rendezvous.endpoints", ["a"], "spec.rendezvous.endpoints[0]", "must be host:port"),
    ("spec.rendezvous.endpoints", ["a:1"] * 2, "spec.rendezvous.endpoints[1]", "must not repeat"),
    (
        "spec.rendezvous",
        {"endpoints": [f"a:{port}" for port in range(17)]},
        "spec.rendezvous.endpoints",
        "must hold at most 16 entries",
    ),
    (
        "spec.rendezvous",
        {"backend": "C10d", "endpoints": ["a:1", "b:1"]},
        "spec.rendezvous.endpoints",
        "must hold at most one endpoint",
    ),
    ("spec.rendezvous.secretName", "s", "spec.rendezvous.secretName", "must be absent unless"),
    (
        "spec.rendezvous",
        {"backend": "C10d", "endpoints": ["a:1"], "secretName": "s"},
        "spec.rendezvous.secretName",
        "must be absent unless",
    ),
    ("spec.rendezvous.joinTimeoutSeconds", 29, "spec.rendezvous.joinTimeoutSeconds", "lastCall"),
    ("spec.rendezvous.lastCallSeconds", 601, "spec.rendezvous.joinTimeoutSeconds", "lastCall"),
    ("spec.rendezvous.keepAliveSeconds", 1, "spec.rendezvous.keepAliveSeconds", "at least 2"),
    ("spec.rendezvous.confirmSeconds", 0, "spec.rendezvous.confirmSeconds", "at least 1"),
    ("spec.rendezvous.backend", "etcd-v2", "spec.rendezvous.backend", "did you mean EtcdV2?"),
    ("spec.rendezvous.backend", "c10d", "spec.rendezvous.backend", "did you mean C10d?"),
    ("spec.elasticity.scaleUp", "Now", "spec.elasticity.scaleUp", "must be one of Immediate,"),
    ("spec.elasticity.settleSeconds", -1, "spec.elasticity.settleSeconds", "at least 0"),
    ("spec.elasticity.disruptionBudget", "yes", "spec.elasticity.disruptionBudget", "true or"),
    ("spec.elasticity.setleSeconds", 1, "spec.elasticity.setleSeconds", "mean settleSeconds?"),
    ("spec.recovery.warmStart", False, "spec.recovery.warmStart", "write Never"),
    ("spec.recovery.warmStartModules", ["a b"], "spec.recovery.warmStartModules[0]", "module"),
    ("spec.recovery.stopGraceSeconds", -1, "spec.recovery.stopGraceSeconds", "at least 0"),
    ("spec.runPolicy.suspend", "true", "spec.runPolicy.suspend", "must be true or false"),
    ("spec.runPolicy.ttlSecondsAfterFinished", -1, "spec.runPolicy.ttlSecondsAfterFinished", "0"),
    ("spec.runPolicy.activeDeadlineSeconds", 0, "spec.runPolicy.activeDeadlineSeconds", "least 1"),
    ("spec.runPolicy.cleanPodPolicy", "Never", "spec.runPolicy.cleanPodPolicy", "None, Running"),
    (
        "spec.runPolicy.schedulingPolicy.minAvailable",
        2,
        "spec.runPolicy.schedulingPolicy.minAvailable",
        "must be absent: nothing acts on it; set it in the scheduler's own PodGroup",
    ),
    (
        "spec.runPolicy.schedulingPolicy.queue",
        "research",
        "spec.runPolicy.schedulingPolicy.queue",
        "must be absent: nothing acts on it; name the queue",
    ),
    ("spec.template", DELETE, "spec.template", "must be set"),
    ("spec.template", "x", "spec.template", "must be a mapping"),
    ("spec.template.spec", DELETE, "spec.template.spec", "must be set"),
    ("spec.template.metadata.labels", {"a": 1}, "spec.template.metadata.labels.a", "in quotes"),
    ("spec.template.spec.restartPolicy", "Always", "spec.template.spec.restartPolicy", "Never"),
    (CONTAINERS, [], CONTAINERS, "must hold at least 1 entry"),
    (CONTAINERS, DELETE, CONTAINERS, "must be set"),
    (CONTAINERS, [{**TRAINER, "name": f"c{n}"} for n in range(17)], CONTAINERS, "at most 16"),
    (CONTAINERS, [TRAINER, {"name": "b"}], "spec.trainer", "must be set when the template"),
    (C0, "trainer", f"{CONTAINERS}[0]", "must be a mapping"),
    (f"{C0}.name", DELETE, f"{CONTAINERS}[0].name", "must be set"),
    (f"{C0}.name", "A", f"{CONTAINERS}[0].name", "must be a DNS label"),
    (f"{C0}.name", "elasticjob-agent", f"{CONTAINERS}[0].name", "names must not be"),
    (f"{C0}.command", DELETE, f"{CONTAINERS}[0].command", "command must be set"),
    (f"{C0}.command", [], f"{CONTAINERS}[0].command", "command must be set"),
    ("spec.entrypoint", ["python3"], "spec.entrypoint", "must be absent if the trainer container"),
    ("spec.setup", ["", "x"], "spec.setup", "must begin with a program"),
    ("spec.setup", "pip install x", "spec.setup", "must be a list"),
    ("spec.launch", "Never", "spec.launch", "PerNode"),
    (f"{C0}.command", "python3 train.py", f"{CONTAINERS}[0].command", "must be a list"),
    (f"{C0}.command", ["sleep", 5], f"{CONTAINERS}[0].command[1]", "put it in quotes"),
    (f"{C0}.env", [{"name": "A", "value": 1}], f"{CONTAINERS}[0].env[0].value", "in quotes"),
    (f"{C0}.env", [{"value": "1"}], f"{CONTAINERS}[0].env[0].name", "must be set"),
    (f"{C0}.resources.limits", {"cpu": []}, f"{CONTAINERS}[0].resources.limits.cpu", "quantity"),
    (
        "spec.template.spec.initContainers",
        [{"name": "trainer"}],
        "spec.template.spec.initContainers[0].name",
        "names must be unique",
    ),
]


def test_only_etcd_v3_backend_has_legal_sizes() -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.nodeIncrement: must be 1 unless"):
        parse_manifest(manifest(nodeIncrement=2, rendezvous={"backend": "C10d"}))
    parse_manifest(manifest(nodeIncrement=2, rendezvous={"backend": "Etcd"}))


@pytest.mark.parametrize(("path", "value", "problem", "message"), INVALID)
def test_one_fault_gives_one_problem_at_its_path(
    path: str, value: Any, problem: str, message: str
) -> None:
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(changed(path, value))
    [found] = caught.value.problems
    assert found.path == problem
    assert message in found.message
    assert "must" in found.message


VALID: list[dict[str, Any]] = [
    {},
    {"minNodes": 4},
    {"nodes": 0},
    {"nodes": 1000},
    {"nodes": None, "trainer": None, "rendezvous": None},
    {"minNodes": 2, "maxNodes": 9, "nodeIncrement": 4},
    {"nodeIncrement": 100},
    {"nprocPerNode": 8},
    {"nprocPerNode": "1024"},
    {"nprocPerNode": "auto"},
    {"nprocPerNode": "gpu"},
    {"nprocPerNode": "cpu"},
    {"nprocPerNode": None},
    {"recovery": {"snapshots": {}}},
    {"recovery": {"snapshots": {"enabled": False, "replicas": 0, "memoryLimit": "512Mi"}}},
    {"recovery": {"snapshots": {"everySteps": 1, "storage": {"claim": "checkpoints"}}}},
    {"recovery": {"snapshots": {"intervalSeconds": 9, "storage": {"path": "/data", "keep": 5}}}},
    {"trainer": "trainer"},
    {"rendezvous": {"endpoints": ["https://etcd.example.com:2379", "[::1]:2379"]}},
    {"rendezvous": {"endpoints": ["10.0.0.1:2379"], "secretName": "etcd.access"}},
    {"rendezvous": {"backend": "C10d", "endpoints": ["host:29400"]}},
    {"rendezvous": {"joinTimeoutSeconds": 10, "lastCallSeconds": 10}},
    {"runPolicy": {"cleanPodPolicy": "None", "ttlSecondsAfterFinished": 0}},
    {
        "trainer": "a",
        "template": {"spec": {"containers": [{"name": "b"}, {**TRAINER, "name": "a"}]}},
    },
]


@pytest.mark.parametrize("spec", VALID)
def test_valid_manifest_survives_round_trip(spec: dict[str, Any]) -> None:
    job = parse_manifest(manifest(**spec))
    assert parse_manifest(job.manifest()) == job


def test_all_problems_are_reported_at_once_and_document_is_unchanged() -> None:
    document = manifest(
        minNodes="2",
        maxNode=8,
        runPolicy={"suspend": "no"},
        rendezvous={"secretName": "s"},
        template={"spec": {"containers": ["oops", {"name": "b"}, {"name": "b"}]}},
    )
    del document["spec"]["maxNodes"]
    before = copy.deepcopy(document)
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(document)
    assert {problem.path for problem in caught.value.problems} == {
        "spec.minNodes",
        "spec.maxNodes",
        "spec.maxNode",
        "spec.runPolicy.suspend",
        "spec.rendezvous.secretName",
        "spec.trainer",
        "spec.template.spec.containers[0]",
        "spec.template.spec.containers[2].name",
    }
    assert document == before
    assert str(caught.value).count("\n") == len(caught.value.problems) - 1


def test_template_keeps_undeclared_fields() -> None:
    document = manifest()
    template = document["spec"]["template"]
    template["spec"] |= {"tolerations": [{"operator": "Exists"}], "hostNetwork": True}
    template["spec"]["containers"][0]["livenessProbe"] = {"exec": {"command": ["true"]}}
    kept = parse_manifest(document).manifest()["spec"]["template"]
    assert kept["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert kept["spec"]["hostNetwork"] is True
    assert kept["spec"]["containers"][0]["livenessProbe"] == {"exec": {"command": ["true"]}}


def test_number_of_workers_in_quotes_is_a_number() -> None:
    assert parse_manifest(manifest(nprocPerNode="8")).spec.nproc_per_node == 8


def test_defaults_match_the_design() -> None:
    spec = parse_manifest(manifest()).manifest()["spec"]
    del spec["template"]
    assert spec == {
        "minNodes": 1,
        "maxNodes": 4,
        "nodeIncrement": 1,
        "launch": "Auto",
        "setup": [],
        "entrypoint": [],
        "maxRestarts": 3,
        "rendezvous": {
            "backend": "Etcd",
            "endpoints": [],
            "joinTimeoutSeconds": 600,
            "lastCallSeconds": 30,
            "keepAliveSeconds": 5,
            "confirmSeconds": 5,
        },
        "elasticity": {
            "scaleUp": "Immediate",
            "scaleUpMaxWaitSeconds": 600,
            "settleSeconds": 3,
            "pendingTimeoutSeconds": 300,
            "disruptionBudget": True,
        },
        "recovery": {
            "warmStart": "Auto",
            "warmStartModules": [],
            "stopGraceSeconds": 10,
            "hangTimeoutSeconds": 0,
        },
        "runPolicy": {"suspend": False, "cleanPodPolicy": "Running"},
    }


@pytest.mark.parametrize("document", [[], "text", None, 3])
def test_manifest_that_is_no_mapping_is_refused(document: Any) -> None:
    with pytest.raises(InvalidManifest, match="must be a mapping"):
        parse_manifest(document)
