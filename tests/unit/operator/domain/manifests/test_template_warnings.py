"""Warnings for pod templates: each fires for its case and for nothing beside it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.domain.manifests.template_warnings import WarningKind, warnings_of
from elasticjob_operator.domain.status.events import EventType, template_warnings
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ConditionType, ElasticJob, parse_manifest
from elasticjob_operator.model.problems import field_path
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import ConditionStatus
from tests.paths import ROOT
from tests.unit.operator.builders import NOW, job, observed

Json = dict[str, Any]
EMPTY = observed()
K = WarningKind
POD = "spec.template.spec"
C0 = f"{POD}.containers[0]"
OWN_SHM = {
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    "hostIPC": True,
}
AT_SHM = {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}]}
PORT = {"containerPort": 29500}
PROBE = {"tcpSocket": {"port": 29500}}
SIDECAR = {"name": "db", "image": "db:1"}
DIGEST = f"sha256:{0:064}"
TAKEN = {"containerPort": 9400, "hostPort": 9400}


def job_of(
    pod: Json | None = None, trainer: Json | None = None, metadata: Json | None = None, **spec: Any
) -> ElasticJob:
    container = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    template: Json = {"spec": {"containers": [container | (trainer or {})], **(pod or {})}}
    return job(template=template | ({"metadata": metadata} if metadata else {}), **spec)


def found(a_job: ElasticJob) -> list[tuple[WarningKind, str]]:
    return [(one.kind, field_path(one.location)) for one in warnings_of(a_job)]


def host(kind: str | None, read_only: bool = False) -> tuple[Json, Json]:
    """Return the pod's part and the trainer's of a template with a mounted host path."""
    path = {"path": "/ckpt"} | ({"type": kind} if kind else {})
    mount = {"name": "v", "mountPath": "/ckpt"} | ({"readOnly": True} if read_only else {})
    return {"volumes": [{"name": "v", "hostPath": path}]}, {"volumeMounts": [mount]}


def memory(**empty: Any) -> Json:
    return {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": empty}]}


def pre_stop(**hook: Any) -> Json:
    return {"lifecycle": {"preStop": hook}}


def against(key: str) -> Json:
    term = {"topologyKey": key, "labelSelector": {}}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


ZONE = {"topologyKey": "zone"}
SPREAD = ZONE | {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
SELECTOR: Json = {"labelSelector": {}}


def affinity(kind: str, *, required: Json | None = None, preferred: Json | None = None) -> Json:
    suffix = "DuringSchedulingIgnoredDuringExecution"
    terms: Json = {f"required{suffix}": [required]} if required else {}
    if preferred:
        terms[f"preferred{suffix}"] = [{"weight": 1, "podAffinityTerm": preferred}]
    return {"affinity": {kind: terms}}


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
FIRING: list[tuple[ElasticJob, WarningKind, str]] = [
    (
        job_of(trainer={"command": ["env", "-i", "python3", "train.py"]}),
        K.ENVIRONMENT_CLEARED,
        f"{C0}.command",
    ),
    (
        job_of(metadata={"labels": {"elasticjob.dev/index": "0", "app": "a"}}),
        K.LABEL_REPLACED,
        'spec.template.metadata.labels["elasticjob.dev/index"]',
    ),
    (
        job_of(
            {"topologySpreadConstraints": [SPREAD | SELECTOR, SPREAD | {"topologyKey": "host"}]}
        ),
        K.SELECTOR_MISSING,
        f"{POD}.topologySpreadConstraints[1]",
    ),
    (
        job_of(affinity("podAntiAffinity", required=ZONE)),
        K.SELECTOR_MISSING,
        f"{POD}.affinity.podAntiAffinity.{REQUIRED}[0]",
    ),
    (
        job_of(affinity("podAffinity", required=ZONE | SELECTOR, preferred=ZONE)),
        K.SELECTOR_MISSING,
        f"{POD}.affinity.podAffinity.{PREFERRED}[0].podAffinityTerm",
    ),
    (
        job_of(trainer={"resources": {"limits": {"memory": "512m", "cpu": "512m"}}}),
        K.FRACTIONAL_BYTES,
        f"{C0}.resources.limits.memory",
    ),
    (
        job_of(
            {"initContainers": [SIDECAR | {"resources": {"requests": {"ephemeral-storage": "9m"}}}]}
        ),
        K.FRACTIONAL_BYTES,
        f"{POD}.initContainers[0].resources.requests.ephemeral-storage",
    ),
    (job_of({"hostIPC": True}), K.HOST_IPC, f"{POD}.hostIPC"),
    (job_of(OWN_SHM, AT_SHM), K.HOST_IPC, f"{POD}.hostIPC"),
    *(
        (job_of({"schedulerName": name}), K.SCHEDULER_WITHOUT_QUEUE, f"{POD}.schedulerName")
        for name in ("volcano", "scheduler-plugins-scheduler", "kai-scheduler", "yunikorn")
    ),
    (
        job_of({"schedulerName": "volcano"}, metadata={"labels": {"queue": "q"}}),
        K.SCHEDULER_WITHOUT_QUEUE,
        f"{POD}.schedulerName",
    ),
    (
        job_of({"terminationGracePeriodSeconds": 5}),
        K.GRACE_TOO_SHORT,
        f"{POD}.terminationGracePeriodSeconds",
    ),
    (
        job_of({"terminationGracePeriodSeconds": 69}, recovery={"stopGraceSeconds": 60}),
        K.GRACE_TOO_SHORT,
        f"{POD}.terminationGracePeriodSeconds",
    ),
    (job_of({"activeDeadlineSeconds": 60}), K.POD_DEADLINE, f"{POD}.activeDeadlineSeconds"),
    (
        job_of({"readinessGates": [{"conditionType": "x"}]}),
        K.READINESS_GATES,
        f"{POD}.readinessGates",
    ),
    (job_of(trainer={"readinessProbe": PROBE}), K.READINESS_PROBE, f"{C0}.readinessProbe"),
    (job_of(trainer={"livenessProbe": PROBE}), K.LIVENESS_PROBE, f"{C0}.livenessProbe"),
    (job_of(trainer={"startupProbe": PROBE}), K.LIVENESS_PROBE, f"{C0}.startupProbe"),
    *(
        (job_of(trainer=pre_stop(**hook)), K.PRE_STOP_TOO_LONG, f"{C0}.lifecycle.preStop")
        for hook in (
            {"sleep": {"seconds": 30}},
            {"exec": {"command": ["sleep", "30"]}},
            {"exec": {"command": ["/bin/sh", "-c", " sleep 90s "]}},
        )
    ),
    (job_of(trainer={"env": [{"name": "RANK"}]}), K.VARIABLE_REPLACED, f"{C0}.env[0].name"),
    *(
        (
            job_of(trainer={"image": image, "imagePullPolicy": "IfNotPresent"}),
            K.FLOATING_IMAGE,
            f"{C0}.image",
        )
        for image in ("trainer", "trainer:latest", "registry:5000/team/trainer")
    ),
    *(
        (
            job_of(trainer={"securityContext": {"capabilities": {kind: ["ALL", name]}}}),
            K.UNKNOWN_CAPABILITY,
            f"{C0}.securityContext.capabilities.{kind}[1]",
        )
        for kind in ("add", "drop")
        for name in ("CAP_SYS_PTRACE", "SYS_PTRAC", "")
    ),
    (job_of(trainer={"ports": [PORT, TAKEN]}), K.HOST_PORT, f"{C0}.ports[1].hostPort"),
    (
        job_of({"hostNetwork": True}, {"ports": [PORT]}),
        K.HOST_PORT,
        f"{C0}.ports[0].containerPort",
    ),
    (
        job_of({"affinity": against("topology.kubernetes.io/zone")}, {"ports": [TAKEN]}),
        K.HOST_PORT,
        f"{C0}.ports[0].hostPort",
    ),
    *(
        (job_of(memory(medium="Memory", **limit)), K.MEMORY_VOLUME_WITHOUT_LIMIT, at)
        for at in (f"{POD}.volumes[1].emptyDir",)
        for limit in ({}, {"sizeLimit": "0"})
    ),
    (
        job_of(*host("DirectoryOrCreate")),
        K.HOST_PATH_PER_MACHINE,
        f"{POD}.volumes[0].hostPath",
    ),
    *(
        (
            job_of(
                trainer={"resources": {"limits": {"memory": "4Gi"}}},
                recovery={"snapshots": {"memoryLimit": limit}},
            ),
            K.SNAPSHOT_MEMORY,
            f"{C0}.resources.limits.memory",
        )
        for limit in ("4Gi", "4294967296", "5G")
    ),
]

SILENT: list[ElasticJob] = [
    job(),
    job_of(metadata={"labels": {"elasticjob.dev/own": "0"}}),
    job_of({"topologySpreadConstraints": [SPREAD | SELECTOR]}),
    job_of(affinity("podAntiAffinity", required=ZONE | SELECTOR, preferred=ZONE | SELECTOR)),
    job_of(trainer={"resources": {"limits": {"memory": "512M", "cpu": "512m"}}}),
    job_of({"hostIPC": False}),
    job_of({"schedulerName": "default-scheduler"}),
    job_of({"schedulerName": "our-own"}),
    *(
        job_of({"schedulerName": scheduler}, metadata={place: {key: "x"}})
        for scheduler, place, key in (
            ("volcano", "annotations", "scheduling.k8s.io/group-name"),
            ("volcano", "annotations", "scheduling.volcano.sh/queue-name"),
            ("scheduler-plugins-scheduler", "labels", "scheduling.x-k8s.io/pod-group"),
            ("kai-scheduler", "labels", "kai.scheduler/queue"),
            ("yunikorn", "labels", "queue"),
            ("yunikorn", "annotations", "yunikorn.apache.org/queue"),
        )
    ),
    job_of({"terminationGracePeriodSeconds": 30}),
    job_of(recovery={"stopGraceSeconds": 600}),
    job_of({"terminationGracePeriodSeconds": 20}),
    job_of({"terminationGracePeriodSeconds": 70}, recovery={"stopGraceSeconds": 60}),
    job_of(runPolicy={"activeDeadlineSeconds": 60}),
    job_of({"readinessGates": []}),
    job_of(
        {
            "initContainers": [
                {"name": "db", "image": "db:1", "restartPolicy": "Always", "readinessProbe": PROBE}
            ]
        },
    ),
    job_of(trainer=pre_stop(sleep={"seconds": 29})),
    job_of({"terminationGracePeriodSeconds": 600}, pre_stop(sleep={"seconds": 300})),
    job_of(trainer=pre_stop(exec={"command": ["sh", "-c", "sleep 90 & save"]})),
    job_of(trainer=pre_stop(httpGet={"port": 80})),
    job_of(trainer={"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}),
    *(
        job_of(trainer={"image": image, "imagePullPolicy": "IfNotPresent"})
        for image in ("t:1", "registry:5000/t:1", f"t@{DIGEST}", f"registry:5000/t:latest@{DIGEST}")
    ),
    job_of(trainer={"image": "trainer:latest"}),
    job_of(
        trainer={"securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": ["all"]}}},
    ),
    job_of(trainer={"ports": [PORT]}),
    job_of({"hostNetwork": True}),
    job_of(trainer={"ports": [TAKEN]}, maxNodes=1),
    job_of({"affinity": against("kubernetes.io/hostname")}, {"ports": [TAKEN]}),
    job_of(memory(medium="Memory", sizeLimit="1Gi")),
    job_of(memory(sizeLimit="1Gi")),
    job_of(*host("Directory")),
    job_of(*host(None)),
    job_of(*host("DirectoryOrCreate", read_only=True)),
    job_of(trainer={"resources": {"limits": {"cpu": 1}}}),
    *(
        job_of(
            trainer={"resources": {"limits": {"memory": "4Gi"}}},
            recovery={"snapshots": snapshots},
        )
        for snapshots in (
            {},
            {"memoryLimit": "4095Mi"},
            {"memoryLimit": "4Gi", "enabled": False},
        )
    ),
]


@pytest.mark.parametrize(("a_job", "kind", "path"), FIRING, ids=lambda value: str(value)[:40])
def test_rarely_meant_template_has_one_warning(
    a_job: ElasticJob, kind: WarningKind, path: str
) -> None:
    assert found(a_job) == [(kind, path)]


def test_warning_of_fractional_bytes_advises_no_amount_that_may_be_wrong() -> None:
    limits = {"memory": "17179869184000m"}  # 16 GiB, as some programs write it
    [warning] = warnings_of(job_of(trainer={"resources": {"limits": limits}}))
    assert warning.kind is K.FRACTIONAL_BYTES
    assert "write it in bytes" in warning.message
    assert "17179869184000Mi" not in warning.message


@pytest.mark.parametrize("a_job", SILENT, ids=lambda one: str(one.spec.template.spec)[:60])
def test_ordinary_template_has_no_warning(a_job: ElasticJob) -> None:
    assert found(a_job) == []


@pytest.mark.parametrize(("a_job", "kind", "path"), FIRING, ids=lambda value: str(value)[:40])
def test_warning_is_a_condition_and_an_event(
    a_job: ElasticJob, kind: WarningKind, path: str
) -> None:
    after = next_status(a_job, EMPTY, EMPTY.rendezvous, NOW)
    [condition] = [one for one in after.conditions if one.type is ConditionType.TEMPLATE_WARNINGS]
    assert (condition.status, condition.reason) == (ConditionStatus.TRUE, kind.value)
    assert condition.message.startswith(f"{path}: {kind}: ")
    [event] = template_warnings(a_job, Status(), after)
    assert (event.type, event.reason) == (EventType.WARNING, kind.value)
    assert event.message == condition.message


@pytest.mark.parametrize("a_job", SILENT, ids=lambda one: str(one.spec.template.spec)[:60])
def test_ordinary_template_has_neither_condition_nor_event(a_job: ElasticJob) -> None:
    after = next_status(a_job, EMPTY, EMPTY.rendezvous, NOW)
    kinds = {one.type for one in after.conditions}
    assert ConditionType.TEMPLATE_WARNINGS not in kinds
    assert template_warnings(a_job, Status(), after) == ()


@pytest.mark.parametrize(
    ("resources", "fires"),
    [
        (None, True),
        ({"limits": {"cpu": "8", "memory": "1Gi"}}, True),
        ({"limits": {"nvidia.com/gpu": "0"}}, True),
        ({"limits": {"nvidia.com/gpu": "8"}}, False),
        ({"requests": {"vendor.example/npu": "1"}}, False),
        ({"claims": [{"name": "gpus"}]}, False),
    ],
)
def test_gpu_workers_without_accelerators_have_a_warning(
    resources: Json | None, fires: bool
) -> None:
    made = job_of(trainer={"resources": resources} if resources else {})
    spec = made.spec.model_copy(update={"nproc_per_node": "gpu"})
    wanted = [(K.ACCELERATORS_NOT_REQUESTED, f"{C0}.resources")] if fires else []
    assert found(made.model_copy(update={"spec": spec})) == wanted


def test_every_kind_fires_in_a_test_and_is_documented() -> None:
    assert {kind for _, kind, _ in FIRING} | {K.ACCELERATORS_NOT_REQUESTED} == set(K)
    documented = (ROOT / "docs" / "pod.md").read_text()
    assert [kind for kind in K if f"| `{kind}` |" not in documented] == []


def test_trainer_beside_other_containers_is_the_one_read() -> None:
    probe = {"readinessProbe": PROBE}
    others = [
        {"name": "board", **probe},
        {"name": "main", "image": "t:1", "command": ["python3"], **probe},
    ]
    made = job(trainer="main", template={"spec": {"containers": others}})
    assert found(made) == [(K.READINESS_PROBE, f"{POD}.containers[1].readinessProbe")]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_example_has_no_warning(path: Any) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if isinstance(document, dict) and document.get("kind") == "ElasticJob":
            assert found(parse_manifest(document)) == []


@pytest.mark.parametrize(
    ("trainer", "place"),
    [
        ({"command": ["env", "-i", "python3", "train.py"]}, "command"),
        ({"command": ["bash", "-c", "sudo -u me python3 train.py"]}, "command"),
        ({"command": ["env", "-i"], "args": ["torchrun", "train.py"]}, "command"),
        ({"command": ["env", "-u", "FOO", "python3", "train.py"]}, ""),
        ({"command": ["sudo", "-E", "python3", "train.py"]}, ""),
    ],
)
def test_command_that_takes_the_variables_of_the_job(trainer: Json, place: str) -> None:
    wanted = [(K.ENVIRONMENT_CLEARED, f"{C0}.{place}")] if place else []
    specs: list[Json] = [{"maxNodes": 2}, {"maxNodes": 1, "nprocPerNode": 2}, {"maxNodes": 1}]
    for spec in specs:
        assert found(job_of(trainer=trainer, **spec)) == wanted
    assert found(job_of(trainer=trainer, maxNodes=1, nprocPerNode=1)) == []


def test_arguments_of_an_entrypoint_that_take_the_variables_of_the_job() -> None:
    trainer = {"command": None, "args": ["env", "-i", "python3", "train.py"]}
    place = f"{C0}.args"
    assert found(job_of(trainer=trainer, entrypoint=["tini", "--"])) == [
        (K.ENVIRONMENT_CLEARED, place)
    ]


JUNK = st.recursive(
    st.sampled_from([None, True, 0, "", "x", "Memory", "IfNotPresent"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "emptyDir", "hostPath", "medium", "preStop", "exec", "x"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=6,
)
POD_FIELDS = ["volumes", "affinity", "hostIPC", "readinessGates", "schedulerName"]
TRAINER_FIELDS = ["lifecycle", "ports", "volumeMounts", "imagePullPolicy", "readinessProbe"]


@given(
    st.dictionaries(st.sampled_from(POD_FIELDS), JUNK),
    st.dictionaries(st.sampled_from(TRAINER_FIELDS), JUNK),
)
def test_fields_of_unexpected_types_are_no_error(pod: Json, trainer: Json) -> None:
    for warning in warnings_of(job_of(pod, trainer)):
        assert str(warning.problem)
