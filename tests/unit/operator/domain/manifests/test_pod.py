"""Pod made from a template, with its full form in golden/pod.json.

To update the file: `python -m tests.unit.operator.domain.manifests.test_pod`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.domain.manifests import pod as pods
from elasticjob_operator.domain.manifests.job_command import decided_launch
from elasticjob_operator.domain.manifests.names import RESERVED_VOLUMES
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings, TemplateRefused
from elasticjob_operator.domain.manifests.sidecar import LOGS_MIB
from elasticjob_operator.model import ElasticJob
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.operator.builders import job

GOLDEN = Path(__file__).parent / "golden" / "pod.json"
SETTINGS = PodSettings("sidecar:1", endpoints=("https://etcd-0:2379", "https://etcd-1:2379"))
ACCESS = Access(b"k", b"ca", "job-uid", "secret")
TRAINER = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
Json = dict[str, Any]


def job_of(spec: Json | None = None, trainer: Json | None = None, **fields: Any) -> ElasticJob:
    """Return a job with these fields in its pod's spec and in its trainer."""
    container = {**TRAINER, **(trainer or {})}
    template = {"spec": {"containers": [container], **(spec or {})}}
    return job(**{"template": template, **fields})


def made(spec: Json | None = None, trainer: Json | None = None, **fields: Any) -> Json:
    return pods.pod(job_of(spec, trainer, **fields), 3, 2, SETTINGS, ACCESS)


def container(made: Json, name: str) -> Json:
    both = made["spec"]["containers"] + made["spec"]["initContainers"]
    [found] = [one for one in both if one["name"] == name]
    return dict(found)


def agent(made: Json) -> Json:
    return container(made, "elasticjob-agent")


def launcher(made: Json) -> Json:
    return container(made, "elasticjob-launcher")


def env(container: Json) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def mounts(container: Json) -> dict[str, str]:
    return {one["mountPath"]: one["name"] for one in container["volumeMounts"]}


def volumes(made: Json) -> dict[str, Json]:
    return {one["name"]: one for one in made["spec"]["volumes"]}


def full() -> Json:
    """Return a template that uses many common fields."""
    trainer = {
        "name": "trainer",
        "image": "registry.example/trainer:1",
        "command": ["/opt/conda/bin/torchrun", "--nproc-per-node=2"],
        "args": ["train.py", "--lr", "$(LR)"],
        "env": [{"name": "LR", "value": "0.1"}],
        "envFrom": [{"configMapRef": {"name": "training"}}],
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi", "cpu": 8}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "lifecycle": {"preStop": {"exec": {"command": ["sync"]}}},
        "readinessProbe": {"exec": {"command": ["true"]}},
    }
    watcher = {"name": "watcher", "image": "watcher:1"}
    fetch = {"name": "fetch", "image": "fetch:1", "args": ["s3://data"]}
    proxy = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}
    spec = {
        "containers": [watcher, trainer],
        "initContainers": [fetch, proxy],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "gpu"},
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
        "imagePullSecrets": [{"name": "mine"}],
        "serviceAccountName": "trainer",
        "schedulerName": "batch",
    }
    metadata = {"labels": {"team": "vision"}, "annotations": {"owner": "ada"}}
    wanted = job(trainer="trainer", template={"metadata": metadata, "spec": spec})
    settings = PodSettings(
        "registry.example/sidecar:1",
        pull_secrets=("ours", "mine"),
        endpoints=("https://etcd-0.etcd:2379",),
        server_name="etcd",
    )
    access = Access(b"k", b"ca", "job-uid", "secret", b"cert", b"key")
    return pods.pod(wanted, 3, 2, settings, access)


def test_complete_pod() -> None:
    assert full() == json.loads(GOLDEN.read_text())


def test_equal_arguments_give_equal_pods_and_stay_unchanged() -> None:
    wanted = job_of()
    before = copy.deepcopy(wanted)
    first = json.dumps(pods.pod(wanted, 3, 2, SETTINGS, ACCESS))
    assert first == json.dumps(pods.pod(wanted, 3, 2, SETTINGS, ACCESS))
    assert wanted == before


# -- additions ----------------------------------------------------------------------


def test_agent_identity_variables() -> None:
    told = env(agent(made()))
    assert told["ELASTICJOB_PREFIX"] == "/elasticjob/default/job-uid/2/"
    assert told["ELASTICJOB_NAME"] == "job-3"
    assert told["ELASTICJOB_SLOTS"] == "launcher"
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in agent(made())["env"]
        if "valueFrom" in one
    }
    assert fields == {
        "ELASTICJOB_MEMBER_ID": "metadata.uid",
        "ELASTICJOB_ADDRESS": "status.podIP",
        "ELASTICJOB_BIND_ADDRESS": "status.podIP",
        "ELASTICJOB_NODE": "spec.nodeName",
    }


@pytest.mark.parametrize(
    ("nproc", "command", "slots", "counted"),
    [
        (None, "python3 train.py", "launcher", "accelerators"),
        ("auto", "python3 train.py", "launcher", "auto"),
        ("gpu", "python3 train.py", "launcher", "gpu"),
        ("cpu", "python3 train.py", "launcher", "cpu"),
        (4, "python3 train.py", "4", None),
        ("4", "python3 train.py", "4", None),
        (None, "torchrun train.py", "launcher", "accelerators"),
        (None, "torchrun --nproc-per-node=4 train.py", "4", None),
        (None, "torchrun --nproc_per_node cpu train.py", "launcher", "cpu"),
        (None, "torchrun --nproc-per-node=$(N) train.py", "launcher", "$(N)"),
        (2, "torchrun --nproc-per-node=$(N) train.py", "2", None),
        (None, "accelerate launch --num_processes 8 --num_machines 2 train.py", "4", None),
    ],
)
def test_number_of_workers_is_fixed_or_counted_by_the_launcher(
    nproc: Any, command: str, slots: str, counted: str | None
) -> None:
    # Resources do not matter: their names say nothing about the devices in the container.
    resources = {"limits": {"nvidia.com/gpu": 8}}
    found = made(trainer={"command": command.split(), "resources": resources}, nprocPerNode=nproc)
    assert env(agent(found))["ELASTICJOB_SLOTS"] == slots
    [trainer] = [one for one in found["spec"]["containers"] if one["name"] == "trainer"]
    assert env(trainer).get("ELASTICJOB_NPROC") == counted


@pytest.mark.parametrize(
    ("command", "nproc", "counted"),
    [
        ("torchrun train.py", None, "$(PET_NPROC_PER_NODE)"),
        ("python -m torch.distributed.run train.py", None, "$(PET_NPROC_PER_NODE)"),
        ("torchrun --nproc-per-node=cpu train.py", None, "cpu"),
        ("torchrun train.py", "gpu", "gpu"),
        ("accelerate launch train.py", None, "accelerators"),
        ("python3 train.py", None, "accelerators"),
    ],
)
def test_variable_of_a_removed_torchrun_is_kept(command: str, nproc: Any, counted: str) -> None:
    own = {"command": command.split(), "env": [{"name": "PET_NPROC_PER_NODE", "value": "2"}]}
    found = made(trainer=own, nprocPerNode=nproc)
    [trainer] = [one for one in found["spec"]["containers"] if one["name"] == "trainer"]
    assert env(trainer)["ELASTICJOB_NPROC"] == counted


def test_launcher_counts_after_the_variables_that_its_word_refers_to() -> None:
    own = {
        "command": ["torchrun", "--nproc-per-node=$(N)", "train.py"],
        "env": [{"name": "N", "value": "3"}],
    }
    [trainer] = [one for one in made(trainer=own)["spec"]["containers"] if one["name"] == "trainer"]
    names = [variable["name"] for variable in trainer["env"]]
    assert names.index("N") < names.index("ELASTICJOB_NPROC")


@pytest.mark.parametrize(
    ("access", "files"),
    [
        (Access(b"k", None, None, None), {"JOB_KEY"}),
        (ACCESS, {"JOB_KEY", "ETCD_CA", "ETCD_USER", "ETCD_PASSWORD"}),
        (
            Access(b"k", b"ca", None, None, b"cert", b"key"),
            {"JOB_KEY", "ETCD_CA", "ETCD_CERT", "ETCD_KEY"},
        ),
    ],
)
def test_agent_gets_paths_of_existing_access_files(access: Access, files: set[str]) -> None:
    told = env(agent(pods.pod(job_of(), 0, 0, SETTINGS, access)))
    named = {name: path for name, path in told.items() if name.endswith("_FILE")}
    assert set(named) == {f"ELASTICJOB_{file}_FILE" for file in files}
    assert all(path.startswith("/run/elasticjob-access/") for path in named.values())


def test_endpoints_of_the_job_take_precedence() -> None:
    own = {"endpoints": ["http://mine:2379"]}
    settings = PodSettings("sidecar:1", endpoints=("https://etcd:2379",), server_name="etcd")
    told = env(agent(pods.pod(job_of(rendezvous=own), 0, 0, settings, ACCESS)))
    assert told["ELASTICJOB_ENDPOINTS"] == "http://mine:2379"
    assert "ELASTICJOB_ETCD_SERVER_NAME" not in told
    told = env(agent(pods.pod(job_of(), 0, 0, settings, ACCESS)))
    assert told["ELASTICJOB_ENDPOINTS"] == "https://etcd:2379"
    assert told["ELASTICJOB_ETCD_SERVER_NAME"] == "etcd"


def test_c10d_agents_get_store_host_and_parameters() -> None:
    job = job_of(rendezvous={"backend": "C10d"}, minNodes=2, maxNodes=6, nodes=3)
    settings = PodSettings("sidecar:1", endpoints=("https://etcd:2379",), server_name="etcd")
    access = Access(b"k", None, None, None)
    keeper, other = (env(agent(pods.pod(job, index, 1, settings, access))) for index in (0, 5))
    name = f"{job.metadata.name}-0.{job.metadata.name}.{job.metadata.namespace}.svc:29400"
    assert keeper["ELASTICJOB_ENDPOINTS"] == other["ELASTICJOB_ENDPOINTS"] == name
    assert (keeper["ELASTICJOB_STORE_HOST"], other["ELASTICJOB_STORE_HOST"]) == ("true", "false")
    assert keeper["ELASTICJOB_BACKEND"] == "c10d"
    assert not [name for name in keeper if name.startswith("ELASTICJOB_ETCD_")]
    bounds = decode(RendezvousParams, "ELASTICJOB_BOUNDS", keeper["ELASTICJOB_BOUNDS"].encode())
    assert (bounds.min_nodes, bounds.max_nodes, bounds.expected) == (2, 6, 3)
    assert keeper["ELASTICJOB_BOUNDS"] == other["ELASTICJOB_BOUNDS"], "or they would not agree"
    ports = [
        port["containerPort"] for port in agent(pods.pod(job, 0, 1, settings, access))["ports"]
    ]
    assert ports == [17946, 29400]


def test_external_store_or_etcd_is_named_and_hosted_by_no_pod() -> None:
    for backend, name in (("C10d", "c10d"), ("EtcdV2", "etcd-v2")):
        job = job_of(rendezvous={"backend": backend, "endpoints": ["there:4001"]})
        told = env(agent(pods.pod(job, 0, 1, SETTINGS, ACCESS)))
        assert (told["ELASTICJOB_BACKEND"], told["ELASTICJOB_ENDPOINTS"]) == (name, "there:4001")
        assert told.get("ELASTICJOB_STORE_HOST", "false") == "false"
    assert "ELASTICJOB_BACKEND" not in env(agent(made()))


@pytest.mark.parametrize("backend", ["C10d", "EtcdV2"])
def test_reporting_agents_cannot_use_the_host_network(backend: str) -> None:
    with pytest.raises(TemplateRefused, match=r"hostNetwork: must not be true .* backend Etcd"):
        made({"hostNetwork": True}, rendezvous={"backend": backend})


def test_only_the_agent_has_the_secret() -> None:
    spec = made({"initContainers": [{"name": "fetch", "image": "fetch:1"}]})["spec"]
    holders = [
        one["name"]
        for one in spec["containers"] + spec["initContainers"]
        if "elasticjob-access" in mounts({"volumeMounts": [], **one}).values()
    ]
    assert holders == ["elasticjob-agent"]
    assert volumes(made())["elasticjob-access"]["secret"] == {
        "secretName": "job-elasticjob",
        "defaultMode": 0o444,
    }


def test_containers_are_ordered_launcher_user_agent() -> None:
    proxy = {"name": "proxy", "image": "p:1", "restartPolicy": "Always"}
    own = [{"name": "fetch", "image": "f:1"}, proxy]
    spec = made({"initContainers": own})["spec"]
    names = [one["name"] for one in spec["initContainers"]]
    assert names == ["elasticjob-launcher", "fetch", "proxy", "elasticjob-agent"]
    assert spec["initContainers"][1:3] == own
    assert agent(made())["restartPolicy"] == "Always"
    assert "restartPolicy" not in launcher(made())


def test_agent_prestop_hook_requests_leave() -> None:
    hook = agent(made())["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:4] == ["python", "-m", "elasticjob_agent", "leave"]


def test_probes_never_restart_the_agent() -> None:
    found = agent(made())
    assert found["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "elasticjob"}
    port = found["ports"][0]["containerPort"]
    assert env(found)["ELASTICJOB_HEALTH_PORT"] == str(port)
    assert "livenessProbe" not in found
    assert "startupProbe" not in found


def test_host_network_has_no_fixed_ports() -> None:
    found = agent(made({"hostNetwork": True}))
    assert "ports" not in found
    assert env(found)["ELASTICJOB_HEALTH_PORT"] == ""
    assert found["readinessProbe"]["exec"]["command"][-1] == "ready"


CONFINED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.mark.parametrize("which", [agent, launcher])
def test_own_containers_meet_restricted_pod_security(which: Any) -> None:
    assert which(made())["securityContext"] == CONFINED


LOOSE = {"privileged": True, "runAsUser": 0, "capabilities": {"add": ["SYS_PTRACE"]}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"launch": "PerNode"},
        {"rendezvous": {"backend": "C10d"}},
        {"rendezvous": {"backend": "EtcdV2", "endpoints": ["there:4001"]}},
        {"spec": {"hostNetwork": True}},
        {"spec": {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}},
        {"spec": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}},
        {
            "spec": {
                "shareProcessNamespace": True,
                "initContainers": [{"name": "own", "image": "i"}],
            }
        },
        {"trainer": {"securityContext": LOOSE}},
    ],
)
def test_added_containers_are_confined_and_those_of_the_template_are_left_alone(
    fields: Json,
) -> None:
    spec = made(**fields)["spec"]
    own = {"trainer": fields.get("trainer", {}).get("securityContext"), "own": None}
    added = set()
    for one in [*spec["containers"], *spec["initContainers"]]:
        found = one.get("securityContext")
        if one["name"] in own:
            assert found == own[one["name"]], one["name"]
            continue
        added.add(one["name"])
        assert {key: found[key] for key in CONFINED} == CONFINED, one["name"]
        assert found.get("runAsUser") != 0
    assert added == {"elasticjob-agent", "elasticjob-launcher"}
    assert spec.get("securityContext") == fields.get("spec", {}).get("securityContext")


@pytest.mark.parametrize("which", [agent, launcher])
@pytest.mark.parametrize(
    ("pod_level", "user"),
    [(None, None), ({}, None), ({"runAsUser": 1234}, None), ({"runAsUser": 0}, 65532)],
)
def test_pod_user_is_kept_unless_root(which: Any, pod_level: Json | None, user: int | None) -> None:
    found = which(made({"securityContext": pod_level}))
    assert found["securityContext"].get("runAsUser") == user
    assert found["securityContext"]["runAsNonRoot"] is True


SMALL = {"requests": {"cpu": "50m", "memory": "64Mi"}}
EQUAL = {key: {"cpu": "500m", "memory": "128Mi"} for key in ("requests", "limits")}
WHOLE = {"limits": {"cpu": "8", "memory": "64Gi"}}
HALF = {"limits": {"cpu": "8"}, "requests": {"memory": "64Gi"}}


@pytest.mark.parametrize(
    ("spec", "trainer", "resources"),
    [
        ({}, {}, SMALL),
        ({}, {"resources": WHOLE}, EQUAL),
        ({}, {"resources": HALF}, SMALL),
        ({"initContainers": [{"name": "i", "resources": WHOLE}]}, {"resources": WHOLE}, EQUAL),
        ({"initContainers": [{"name": "i"}]}, {"resources": WHOLE}, SMALL),
        ({"resources": WHOLE}, {"resources": WHOLE}, None),
        ({"resources": {"requests": {"cpu": "8"}}}, {}, {"requests": {"memory": "64Mi"}}),
        ({"resources": {}}, {"resources": WHOLE}, EQUAL),
    ],
)
def test_added_containers_keep_quality_of_service_class(
    spec: Json, trainer: Json, resources: Json | None
) -> None:
    found = made(spec, trainer)
    for container in (agent(found), launcher(found)):
        assert container.get("resources") == resources


@pytest.mark.parametrize(
    ("spec", "resources"),
    [
        ({}, EQUAL),
        ({"resources": WHOLE}, None),
        ({"resources": {"limits": {"cpu": "8"}}}, {k: {"memory": "128Mi"} for k in EQUAL}),
    ],
)
def test_limits_in_all_pods_are_added_where_the_pod_has_none(
    spec: Json, resources: Json | None
) -> None:
    settings = replace(SETTINGS, always_limited=True)
    found = pods.pod(
        job(template={"spec": {"containers": [TRAINER], **spec}}), 0, 0, settings, ACCESS
    )
    assert agent(found).get("resources") == resources


def test_ephemeral_storage_limit_leaves_room_for_logs() -> None:
    found = made(trainer={"resources": {"limits": {"ephemeral-storage": "1Gi"}}})
    assert agent(found)["resources"]["limits"] == {"ephemeral-storage": "576Mi"}
    assert agent(found)["resources"]["requests"]["ephemeral-storage"] == "576Mi"


def test_logs_of_all_workers_fit_their_volume() -> None:
    total = int(env(agent(made()))["ELASTICJOB_TOTAL_LOG_BYTES"])
    assert 0 < total < LOGS_MIB * 1024 * 1024
    assert volumes(made())["elasticjob-logs"] == {
        "name": "elasticjob-logs",
        "emptyDir": {"sizeLimit": f"{LOGS_MIB}Mi"},
    }


def test_token_is_mounted_only_on_request() -> None:
    assert made()["spec"]["automountServiceAccountToken"] is False
    said = made({"automountServiceAccountToken": False})["spec"]
    assert said["automountServiceAccountToken"] is False
    assert "elasticjob-no-token" not in volumes(made())


def test_requested_token_is_hidden_from_own_containers() -> None:
    found = made({"automountServiceAccountToken": True})
    assert found["spec"]["automountServiceAccountToken"] is True
    place = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert mounts(agent(found))[place] == "elasticjob-no-token"
    assert mounts(launcher(found))[place] == "elasticjob-no-token"
    assert place not in mounts(container(found, "trainer"))
    assert volumes(found)["elasticjob-no-token"]["emptyDir"] == {}


# -- the trainer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "launch", "mode"),
    [
        (["python3", "train.py"], "Auto", "PerWorker"),
        (["bash", "-c", "torchrun train.py"], "Auto", "PerNode"),
        (["accelerate", "launch", "--config_file=c", "train.py"], "Auto", "PerNode"),
        (["python3", "train.py"], "PerNode", "PerNode"),
        (["bash", "run.sh"], "PerWorker", "PerWorker"),
    ],
)
def test_agent_gets_the_launch_and_the_trainer_its_own_command(
    command: list[str], launch: str, mode: str
) -> None:
    container = {"name": "trainer", "image": "trainer:1", "command": command}
    wanted = job(launch=launch, maxNodes=4, template={"spec": {"containers": [container]}})
    made = pods.pod(wanted, 0, 1, SETTINGS, ACCESS)["spec"]
    [agent] = [one for one in made["initContainers"] if one["name"] == "elasticjob-agent"]
    assert {"name": "ELASTICJOB_LAUNCH", "value": mode} in agent["env"]
    [trainer] = made["containers"]
    options = ["--check"] if (launch, mode) == ("Auto", "PerWorker") else []
    assert trainer["command"][1:] == ["/elasticjob/launcher.pyz", *options, "--", *command]
    several = [one["value"] for one in trainer["env"] if one["name"] == "ELASTICJOB_SEVERAL_NODES"]
    assert several == (["1"] if options else [])
    status = decided_launch(wanted)
    assert status is not None
    assert status.mode == mode


def test_entry_point_of_the_image_stands_before_args() -> None:
    container = {"name": "trainer", "image": "trainer:1", "args": ["--lr", "$(LR)"]}
    wanted = job(
        entrypoint=["/opt/bin/python", "train.py"],
        setup=["pip", "install", "x"],
        template={"spec": {"containers": [container]}},
    )
    [trainer] = pods.pod(wanted, 0, 1, SETTINGS, ACCESS)["spec"]["containers"]
    assert trainer["command"] == [
        "/opt/bin/python", "/elasticjob/launcher.pyz", "--setup", "3", "pip", "install", "x",
        "--check", "--", "/opt/bin/python", "train.py",
    ]  # fmt: skip
    assert trainer["args"] == ["--lr", "$(LR)"]


def test_launch_of_refused_command_is_not_in_the_status() -> None:
    container = {"name": "trainer", "image": "trainer:1", "command": ["mpirun", "python", "t.py"]}
    assert decided_launch(job(template={"spec": {"containers": [container]}})) is None


def test_launcher_runs_command_of_trainer() -> None:
    found = container(made(trainer={"args": ["--lr", "$(LR)"]}), "trainer")
    launcher = ["python3", "/elasticjob/launcher.pyz", "--check", "--"]
    assert found["command"] == [*launcher, "python3", "train.py"]
    assert found["args"] == ["--lr", "$(LR)"]


def test_removed_launcher_options_are_annotated() -> None:
    found = made(trainer={"command": ["torchrun", "--nnodes=2"], "args": ["train.py"]})
    trainer = container(found, "trainer")
    assert trainer["command"][4:] == ["python3", "-u", "train.py"]
    assert "args" not in trainer
    note = found["metadata"]["annotations"]["elasticjob.dev/command"]
    assert note.endswith("not used: --nnodes=2")


def test_other_trainer_fields_stay() -> None:
    own = {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "readinessProbe": {"exec": {"command": ["true"]}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "workingDir": "/workspace",
        "ports": [{"containerPort": 6006}],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "subPath": "x"}],
    }
    found = container(made({"volumes": [{"name": "data", "emptyDir": {}}]}, own), "trainer")
    for key, value in own.items():
        kept = found[key][: len(value)] if isinstance(value, list) else found[key]
        assert kept == value, key
    assert "terminationMessagePolicy" not in found


def test_variables_that_a_service_would_set_are_set() -> None:
    """A service named elasticjob-probe makes the kubelet set ELASTICJOB_PROBE_PORT=tcp://…"""
    assert env(container(made(), "trainer"))["ELASTICJOB_PROBE_PORT"] == "0"
    for spec in ({}, {"hostNetwork": True}):
        assert "ELASTICJOB_HEALTH_PORT" in env(agent(made(spec)))


def test_custom_termination_message_path_is_passed_to_the_launcher() -> None:
    found = container(made(trainer={"terminationMessagePath": "/tmp/end"}), "trainer")
    assert env(found)["ELASTICJOB_TERMINATION_LOG"] == "/tmp/end"
    assert "ELASTICJOB_TERMINATION_LOG" not in env(container(made(), "trainer"))


def test_shared_memory_is_a_memory_volume() -> None:
    assert mounts(container(made(), "trainer"))["/dev/shm"] == "elasticjob-shm"
    assert volumes(made())["elasticjob-shm"]["emptyDir"] == {"medium": "Memory"}


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/", "/dev//shm"])
def test_shared_memory_of_user_stays(path: str) -> None:
    own = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    trainer = {"volumeMounts": [{"name": "shm", "mountPath": path}]}
    found = made({"volumes": [own]}, trainer)
    assert "elasticjob-shm" not in volumes(found)
    assert mounts(container(found, "trainer"))[path] == "shm"


@pytest.mark.parametrize("path", ["/dev/shm/nccl", "/dev/shmem", "/dev", "/data/dev/shm"])
def test_mount_beside_shared_memory_leaves_the_volume(path: str) -> None:
    own = {"name": "own", "emptyDir": {}}
    found = made({"volumes": [own]}, {"volumeMounts": [{"name": "own", "mountPath": path}]})
    assert mounts(container(found, "trainer"))["/dev/shm"] == "elasticjob-shm"
    assert mounts(container(found, "trainer"))[path] == "own"


@pytest.mark.parametrize(("host_ipc", "added"), [(True, False), (False, True)])
def test_pod_with_host_ipc_keeps_shared_memory_of_its_machine(host_ipc: bool, added: bool) -> None:
    found = made({"hostIPC": host_ipc})
    assert ("elasticjob-shm" in volumes(found)) is added
    assert ("/dev/shm" in mounts(container(found, "trainer"))) is added


def test_second_container_is_unchanged() -> None:
    second = {"name": "board", "image": "board:1", "args": ["--port=6006"]}
    wanted = job(trainer="trainer", template={"spec": {"containers": [second, TRAINER]}})
    found = pods.pod(wanted, 0, 0, SETTINGS, ACCESS)
    assert found["spec"]["containers"][0] == second
    annotations = found["metadata"]["annotations"]
    assert annotations["kubectl.kubernetes.io/default-container"] == "trainer"


# -- the pod ------------------------------------------------------------------------


def test_names_labels_and_owner() -> None:
    found = made()
    assert found["metadata"]["name"] == "job-3"
    assert found["metadata"]["namespace"] == "default"
    labels = found["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if "elasticjob.dev" in name} == {
        "elasticjob.dev/job-name": "job",
        "elasticjob.dev/job-uid": "job-uid",
        "elasticjob.dev/index": "3",
        "elasticjob.dev/incarnation": "2",
    }
    assert found["metadata"]["ownerReferences"][0]["controller"] is True
    assert (found["spec"]["hostname"], found["spec"]["subdomain"]) == ("job-3", "job")
    assert found["spec"]["restartPolicy"] == "Never"
    assert "finalizers" not in found["metadata"]


def test_own_labels_cannot_be_overridden() -> None:
    labels = {"elasticjob.dev/index": "0", "app": "mine"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [TRAINER]}}
    found = made(template=template)["metadata"]["labels"]
    assert (found["elasticjob.dev/index"], found["app"]) == ("3", "mine")


def test_service_meshes_are_disabled() -> None:
    metadata = made()["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["labels"]["istio.io/dataplane-mode"] == "none"
    assert metadata["annotations"]["linkerd.io/inject"] == "disabled"


def test_requested_ambient_mode_stays() -> None:
    mode = {"istio.io/dataplane-mode": "ambient"}
    template = {"metadata": {"labels": mode}, "spec": {"containers": [TRAINER]}}
    assert made(template=template)["metadata"]["labels"].items() >= mode.items()


@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_requested_service_mesh_is_enabled(kind: str) -> None:
    template = {
        "metadata": {kind: {"sidecar.istio.io/inject": "true"}},
        "spec": {"containers": [TRAINER]},
    }
    metadata = made(template=template)["metadata"]
    both = metadata["labels"] | metadata["annotations"]
    assert both["sidecar.istio.io/inject"] == "true"
    assert both["linkerd.io/inject"] == "disabled"


def test_own_volumes_do_not_block_node_scale_down() -> None:
    name = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    ours = "elasticjob,elasticjob-logs,elasticjob-control,elasticjob-shm"
    assert made()["metadata"]["annotations"][name] == ours
    template = {
        "metadata": {"annotations": {name: "cache"}},
        "spec": {"containers": [TRAINER]},
    }
    assert made(template=template)["metadata"]["annotations"][name] == f"cache,{ours}"


@pytest.mark.parametrize(
    ("given", "stop", "seconds"), [(None, 10, 30), (None, 60, 80), (5, 60, 5), (600, 10, 600)]
)
def test_termination_grace_is_sufficient_unless_given(
    given: int | None, stop: int, seconds: int
) -> None:
    spec = {"terminationGracePeriodSeconds": given} if given else {}
    found = made(spec, recovery={"stopGraceSeconds": stop})
    assert found["spec"]["terminationGracePeriodSeconds"] == seconds
    assert env(agent(found))["ELASTICJOB_STOP_GRACE_SECONDS"] == str(stop)
    assert env(container(found, "trainer"))["ELASTICJOB_STOP_GRACE_SECONDS"] == str(stop)


def test_first_lease_has_the_duration_of_the_job() -> None:
    """An agent requests the lease before it has read the job's bounds."""
    found = made(rendezvous={"keepAliveSeconds": 9})
    assert env(agent(found))["ELASTICJOB_KEEP_ALIVE_SECONDS"] == "9"


def test_pull_secrets_are_merged() -> None:
    settings = PodSettings("sidecar:1", pull_secrets=("ours", "both"))
    spec = {"imagePullSecrets": [{"name": "mine"}, {"name": "both"}]}
    found = pods.pod(job_of(spec), 0, 0, settings, ACCESS)["spec"]["imagePullSecrets"]
    assert found == [{"name": "mine"}, {"name": "both"}, {"name": "ours"}]
    assert "imagePullSecrets" not in made()["spec"]


def test_gang_priority_is_the_pod_priority() -> None:
    policy = {"schedulingPolicy": {"priorityClass": "high"}}
    assert made(runPolicy=policy)["spec"]["priorityClassName"] == "high"
    same = made({"priorityClassName": "high"}, runPolicy=policy)
    assert same["spec"]["priorityClassName"] == "high"
    assert made({"priorityClassName": "low"})["spec"]["priorityClassName"] == "low"


def test_unrelated_template_fields_stay() -> None:
    own: Json = {
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "schedulerName": "batch",
        "shareProcessNamespace": True,
        "securityContext": {"fsGroup": 5, "runAsUser": 7},
        "runtimeClassName": "nvidia",
        "dnsPolicy": "None",
        "serviceAccountName": "mine",
    }
    found = made(own)["spec"]
    assert {key: found[key] for key in own} == own


# -- refusals -----------------------------------------------------------------------


def mount(name: str, path: str) -> Json:
    return {"volumeMounts": [{"name": name, "mountPath": path}]}


NOT_OURS = "containers[0].volumeMounts[0].mountPath: must not be"
SPECS: list[tuple[Json, str]] = [
    (
        {"volumes": [{"name": "x"}, {"name": "elasticjob-logs"}]},
        "volumes[1].name: must not be elasticjob-logs: this volume is added",
    ),
    ({"volumes": "x"}, "volumes: must be a list"),
    ({"volumes": ["x"]}, "volumes[0]: must be a mapping"),
    (
        {"initContainers": [{"name": "a", **mount("elasticjob-access", "/x")}]},
        "initContainers[0].volumeMounts[0].name: must not be elasticjob-access",
    ),
    ({"hostname": "x"}, "hostname: must be absent"),
    ({"subdomain": "x"}, "subdomain: must be absent"),
    ({"imagePullSecrets": {}}, "imagePullSecrets: must be a list"),
    ({"securityContext": "x"}, "securityContext: must be a mapping"),
]
TRAINERS: list[tuple[Json, str]] = [
    (mount("x", "/elasticjob"), f"{NOT_OURS} /elasticjob or below"),
    (mount("x", "/elasticjob//logs/"), f"{NOT_OURS} /elasticjob or below"),
    (mount("x", "/elasticjob-logs/a"), f"{NOT_OURS} /elasticjob-logs or below"),
    (mount("elasticjob", "/x"), "containers[0].volumeMounts[0].name: must not be elasticjob"),
    (
        {"volumeDevices": [{"name": "elasticjob-shm", "devicePath": "/x"}]},
        "containers[0].volumeDevices[0].name: must not be elasticjob-shm",
    ),
    ({"volumeMounts": {}}, "containers[0].volumeMounts: must be a list"),
    (
        {"env": [{"name": "A"}, {"name": "ELASTICJOB_SOCKET", "value": "/x"}]},
        "containers[0].env[1].name: must not begin with ELASTICJOB_",
    ),
    ({"restartPolicy": "Always"}, "containers[0].restartPolicy: must be absent"),
    (
        {"command": ["mpirun", "python3", "train.py"]},
        "containers[0].command: mpirun does not join the job's rendezvous",
    ),
    (
        {"command": ["torchrun", "--nproc-per-node=0", "train.py"]},
        "containers[0].command: torchrun --nproc-per-node=0 must be auto, gpu, cpu or a number",
    ),
]
REFUSED: list[tuple[Json, Json, str]] = [(spec, {}, said) for spec, said in SPECS] + [
    ({}, own, said) for own, said in TRAINERS
]


@pytest.mark.parametrize(("spec", "trainer", "message"), REFUSED)
def test_template_conflict_is_refused_with_its_field(
    spec: Json, trainer: Json, message: str
) -> None:
    with pytest.raises(TemplateRefused) as refused:
        made(spec, trainer)
    assert str(refused.value).startswith("spec.template.spec.")
    assert message in str(refused.value)


def test_option_that_contradicts_the_number_of_workers_is_refused() -> None:
    own = {"command": ["torchrun", "--nproc-per-node=2", "train.py"]}
    with pytest.raises(TemplateRefused, match=r"command: torchrun --nproc-per-node=2 contradicts"):
        made(trainer=own, nprocPerNode=1)


def test_two_priorities_are_refused() -> None:
    with pytest.raises(TemplateRefused, match=r"priorityClassName: must be absent or high"):
        made(
            {"priorityClassName": "low"},
            runPolicy={"schedulingPolicy": {"priorityClass": "high"}},
        )


@pytest.mark.parametrize("path", ["/elasticjobs", "/data/elasticjob", "/elasticjob2/x"])
def test_similar_mount_paths_are_allowed(path: str) -> None:
    mount = {"name": "x", "mountPath": path}
    assert mounts(container(made(trainer={"volumeMounts": [mount]}), "trainer"))[path] == "x"


JUNK = st.recursive(
    st.sampled_from([None, True, 0, 7, "", "x", "/dev/shm", *RESERVED_VOLUMES]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "mountPath", "runAsUser", "x"]), inner, max_size=2
        )
    ),
    max_leaves=6,
)
FIELDS = ["volumes", "securityContext", "hostNetwork", "hostname", "imagePullSecrets"]
INNER = ["volumeMounts", "volumeDevices", "restartPolicy", "terminationMessagePath", "lifecycle"]


@given(
    st.dictionaries(st.sampled_from(FIELDS), JUNK),
    st.dictionaries(st.sampled_from(INNER), JUNK),
)
def test_any_template_gives_a_pod_or_is_refused(spec: Json, trainer: Json) -> None:
    try:
        found = made(spec, trainer)
    except TemplateRefused:
        return
    json.dumps(found)
    assert found["spec"]["initContainers"][-1]["name"] == "elasticjob-agent"
    names = [one.get("name") for one in found["spec"]["volumes"]]
    assert [name for name in names if name in RESERVED_VOLUMES] == [
        name for name in RESERVED_VOLUMES if name in names
    ]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(full(), indent=2) + "\n")
