"""Pod of a job: the user's template, plus the launcher in the trainer's command and the agent.

Deterministic. See docs/pod.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests import names, template_rules
from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.owned_objects import Access, owner_reference
from elasticjob_operator.domain.manifests.resources import amounts, is_guaranteed, pod_level
from elasticjob_operator.domain.manifests.sidecar import (
    LOGS_MIB,
    PodSettings,
    PodTraits,
    agent,
    launcher,
    mount,
    variable,
)
from elasticjob_operator.domain.manifests.snapshots import snapshot_variables, snapshot_volumes
from elasticjob_operator.domain.manifests.template_rules import (
    TemplateRefused,
    is_same,
    mapping,
    mappings,
)
from elasticjob_operator.domain.manifests.trainer_command import TrainerCommand, node_workers
from elasticjob_operator.domain.plan.backends import is_steered
from elasticjob_operator.domain.plan.lifecycle import grace_seconds
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.types import Launch
from elasticjob_rendezvous.protocol.text import bounded

__all__ = ["PodSettings", "TemplateRefused", "pod", "traits_of"]

_SECRET_MODE = 0o444
"""Mode that lets the agent read the Secret as any user; only the agent mounts the volume."""
_MESHES = {
    "sidecar.istio.io/inject": "false",
    "istio.io/dataplane-mode": "none",
    "kuma.io/sidecar-injection": "disabled",
    "linkerd.io/inject": "disabled",
    "consul.hashicorp.com/connect-inject": "false",
}
"""Labels and annotations that switch off service meshes: a mesh's proxy breaks collectives and
outlives the trainer. Istio has two, for its sidecar and for its ambient mode."""
_MESH_LABELS = ("sidecar.istio.io/inject", "istio.io/dataplane-mode", "kuma.io/sidecar-injection")
"""Keys of `_MESHES` that are labels; the others are annotations."""
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_EVICTABLE_VOLUMES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""Annotation that lets the autoscaler remove machines that hold emptyDir volumes of the pod."""
_PREFERRED, _MOST_WEIGHT = "preferredDuringSchedulingIgnoredDuringExecution", 100
_SCRATCH = (names.SHARED_VOLUME, names.LOGS_VOLUME, names.CONTROL_VOLUME, names.SHM_VOLUME)


def trainer(job: ElasticJob, own: Json, command: TrainerCommand, workers: str, shm: bool) -> Json:
    """Return the template's container `own` with its new command and the launcher's variables and
    mounts, with `shm` also one at /dev/shm; all other fields are unchanged.

    `workers` is the number of workers per node, or the word by which the launcher counts them.
    """
    rest = {key: value for key, value in own.items() if key != "args"}
    variables = [
        variable("SOCKET", names.SOCKET_PATH),
        # The default, set explicitly: for a Service called elasticjob-probe the kubelet would
        # inject a variable of this name.
        variable("PROBE_PORT", 0),
        variable("STOP_GRACE_SECONDS", job.spec.recovery.stop_grace_seconds),
    ]
    if not workers.isdigit() and command.mode is Launch.PER_WORKER:
        variables.append(variable("NPROC", workers))
    if command.is_checked:
        variables.append(variable("SEVERAL_NODES", int(job.spec.max_nodes > 1)))
    if path := own.get("terminationMessagePath"):
        variables.append(variable("TERMINATION_LOG", path))
    mounts = [
        mount(names.SHARED_VOLUME, names.SHARED_PATH),
        mount(names.LOGS_VOLUME, names.LOGS_PATH),
    ]
    if shm:
        mounts.append(mount(names.SHM_VOLUME, names.SHM_PATH))
    mounts += [mount(volume["name"], path) for volume, path in snapshot_volumes(job)]
    given = snapshot_variables(job, names.STORAGE_PATH, names.SNAPSHOTS_PATH)
    variables += [{"name": name, "value": value} for name, value in given.items()]
    return {
        **rest,
        "command": list(command.command),
        **({"args": list(command.args)} if command.args else {}),
        "env": [*(own.get("env") or ()), *variables],
        "volumeMounts": [*(own.get("volumeMounts") or ()), *mounts],
    }


def needs_shm(spec: Json, own: Json) -> bool:
    """Return True if /dev/shm needs a volume: data loaders need more than the runtime's 64 MiB.

    A mount of the user's at /dev/shm takes precedence, and so does the machine's own, which a pod
    with hostIPC gets.
    """
    mounts = own.get("volumeMounts") or ()
    own_path = any(is_same(one.get("mountPath"), names.SHM_PATH) for one in mounts)
    return not own_path and spec.get("hostIPC") is not True


def pod(
    job: ElasticJob,
    index: int,
    incarnation: int,
    settings: PodSettings,
    access: Access,
    avoid: Sequence[str] = (),
) -> Json:
    """Return the manifest of the job's pod with this index.

    The pod prefers machines that are not in `avoid`.

    Raises:
        TemplateRefused: no pod can be made from the template; names the field and the fix.
    """
    template = job.spec.template.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec: Json = template["spec"]
    template_rules.check_template(spec, job.trainer().name)
    [own] = [
        container for container in spec["containers"] if container["name"] == job.trainer().name
    ]
    command = command_for(job)
    shm = needs_shm(spec, own)
    name = names.pod_name(job.metadata.name, index)
    traits = traits_of(spec, own, command.mode)
    if traits.host_network and not is_steered(job):
        raise TemplateRefused.at(
            ("hostNetwork",),
            f"must not be true with rendezvous.backend {job.spec.rendezvous.backend}: its agents "
            "answer at fixed ports, which other pods on the machine may hold; or use backend Etcd",
        )
    given = [one.name for one in job.trainer().env or ()]
    workers = node_workers(job.spec.nproc_per_node, command, given)
    ours = agent(job, index, incarnation, settings, access, traits, workers)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            **_labels_and_annotations(job, index, incarnation, template, bounded(command.note)),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "terminationGracePeriodSeconds": grace_seconds(job),
            "automountServiceAccountToken": False,
            **spec,
            **_priority(job, spec),
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": names.service_name(job),
            **_pull_secrets(spec, settings),
            **_affinity(spec, avoid),
            "initContainers": [
                launcher(settings, traits),
                *mappings(spec, "initContainers", ()),
                ours,
            ],
            "containers": [
                trainer(job, own, command, workers, shm) if container is own else container
                for container in spec["containers"]
            ],
            "volumes": [*mappings(spec, "volumes", ()), *_volumes(job, shm, traits)],
        },
    }


def traits_of(spec: Json, own: Json, launch: Launch = Launch.PER_WORKER) -> PodTraits:
    """Return the properties of a template's pod spec with the trainer container `own`."""
    whole = pod_level(spec)
    containers = (*spec["containers"], *mappings(spec, "initContainers", ()))
    return PodTraits(
        host_network=spec.get("hostNetwork") is True,
        root=mapping(spec, "securityContext", ()).get("runAsUser") == 0,
        token=spec.get("automountServiceAccountToken") is True,
        bounded_disk="ephemeral-storage" in amounts(own, "limits"),
        guaranteed=not whole and is_guaranteed(containers),
        pod_level=whole,
        launch=launch,
    )


def _labels_and_annotations(
    job: ElasticJob,
    index: int,
    incarnation: int,
    template: Mapping[str, Any],
    note: str,
) -> Json:
    """Return labels and annotations: the user's, defaults for absent ones, and the operator's."""
    metadata = template.get("metadata") or {}
    labels, annotations = (
        dict(metadata.get("labels") or {}),
        dict(metadata.get("annotations") or {}),
    )
    for mesh, off in _MESHES.items():
        if mesh not in labels and mesh not in annotations:
            (labels if mesh in _MESH_LABELS else annotations)[mesh] = off
    annotations.setdefault(_DEFAULT_CONTAINER, job.trainer().name)
    scratch = [volume["name"] for volume, _ in snapshot_volumes(job) if "emptyDir" in volume]
    evictable = filter(None, (annotations.get(_EVICTABLE_VOLUMES), *_SCRATCH, *scratch))
    annotations[_EVICTABLE_VOLUMES] = ",".join(evictable)
    if note:
        annotations[names.COMMAND_ANNOTATION] = note
    return {
        "labels": labels | names.pod_labels(job, index, incarnation),
        "annotations": annotations,
    }


def _priority(job: ElasticJob, spec: Json) -> Json:
    policy = job.spec.run_policy.scheduling_policy
    wanted = policy.priority_class if policy else None
    given = spec.get("priorityClassName")
    if wanted and given and wanted != given:
        raise TemplateRefused.at(
            ("priorityClassName",),
            f"must be absent or {wanted}, as runPolicy.schedulingPolicy.priorityClass is",
        )
    return {"priorityClassName": wanted} if wanted else {}


def _affinity(spec: Json, avoid: Sequence[str]) -> Json:
    """Return the user's affinity, with a preference for machines that are not in `avoid`."""
    if not avoid:
        return {}
    affinity = mapping(spec, "affinity", ())
    nodes = mapping(affinity, "nodeAffinity", ("affinity",))
    where = ("affinity", "nodeAffinity")
    preferred = mappings(nodes, _PREFERRED, where)
    others = [
        {"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in avoid
    ]
    wish = {"weight": _MOST_WEIGHT, "preference": {"matchFields": others}}
    return {"affinity": {**affinity, "nodeAffinity": {**nodes, _PREFERRED: [*preferred, wish]}}}


def _pull_secrets(spec: Json, settings: PodSettings) -> Json:
    given = mappings(spec, "imagePullSecrets", ())
    known = [secret.get("name") for secret in given]
    added = [{"name": name} for name in settings.pull_secrets if name not in known]
    return {"imagePullSecrets": [*given, *added]} if given or added else {}


def _volumes(job: ElasticJob, shm: bool, traits: PodTraits) -> list[Json]:
    secret = {"secretName": names.secret_name(job), "defaultMode": _SECRET_MODE}
    found: list[Json] = [
        {"name": names.SHARED_VOLUME, "emptyDir": {}},
        {"name": names.LOGS_VOLUME, "emptyDir": {"sizeLimit": f"{LOGS_MIB}Mi"}},
        {"name": names.CONTROL_VOLUME, "emptyDir": {}},
        {"name": names.ACCESS_VOLUME, "secret": secret},
    ]
    if shm:
        found.append({"name": names.SHM_VOLUME, "emptyDir": {"medium": "Memory"}})
    found += [volume for volume, _ in snapshot_volumes(job)]
    if traits.token:
        found.append({"name": names.NO_TOKEN_VOLUME, "emptyDir": {}})
    return found
