"""Warnings for pod templates that are legal and rarely mean what they do.

One list for `elasticjob validate`, `elasticjob run` and the operator: docs/pod.md has the table.
A warning never keeps a job from running. The rules read any template that parses: a field of an
unexpected type, which the API server refuses, yields no warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import JOB_LABEL, SHM_PATH, pod_labels
from elasticjob_operator.domain.manifests.resources import amounts, quantity, requests_devices
from elasticjob_operator.domain.manifests.snapshots import memory_bytes
from elasticjob_operator.domain.manifests.template_rules import POD_SPEC, is_same
from elasticjob_operator.domain.plan.lifecycle import MARGIN_SECONDS, grace_seconds
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import Location, Problem
from elasticjob_rendezvous.protocol.text import echoed


class WarningKind(StrEnum):
    """Kind of a warning; the reason of its event and in the condition `TemplateWarnings`."""

    ACCELERATORS_NOT_REQUESTED = "AcceleratorsNotRequested"
    FLOATING_IMAGE = "FloatingImage"
    FRACTIONAL_BYTES = "FractionalBytes"
    GRACE_TOO_SHORT = "GraceTooShort"
    HOST_IPC = "HostIPC"
    HOST_PATH_PER_MACHINE = "HostPathPerMachine"
    HOST_PORT = "HostPort"
    LABEL_REPLACED = "LabelReplaced"
    LIVENESS_PROBE = "LivenessProbe"
    MEMORY_VOLUME_WITHOUT_LIMIT = "MemoryVolumeWithoutLimit"
    POD_DEADLINE = "PodDeadline"
    PRE_STOP_TOO_LONG = "PreStopTooLong"
    READINESS_GATES = "ReadinessGates"
    READINESS_PROBE = "ReadinessProbe"
    SCHEDULER_WITHOUT_QUEUE = "SchedulerWithoutQueue"
    SELECTOR_MISSING = "SelectorMissing"
    SNAPSHOT_MEMORY = "SnapshotMemory"
    UNKNOWN_CAPABILITY = "UnknownCapability"
    VARIABLE_REPLACED = "VariableReplaced"


@dataclass(frozen=True, slots=True)
class TemplateWarning:
    """One warning. `location` counts from the document's root; the message has the effect and the
    remedy."""

    kind: WarningKind
    location: Location
    message: str

    @property
    def problem(self) -> Problem:
        """The warning in the form of an error; its text begins with the kind."""
        return Problem.at(self.location, f"{self.kind}: {self.message}")


@dataclass(frozen=True, slots=True)
class _Template:
    """Template as plain values. Locations are relative to the pod's spec."""

    job: ElasticJob
    metadata: Json
    spec: Json
    trainer: Json
    at: Location

    @property
    def several(self) -> bool:
        """True if two of the job's pods can run at once."""
        return self.job.spec.max_nodes > 1


_CAPABILITIES = frozenset(
    {"ALL", "AUDIT_CONTROL", "AUDIT_READ", "AUDIT_WRITE", "BLOCK_SUSPEND", "BPF"}
    | {"CHECKPOINT_RESTORE", "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID"}
    | {"IPC_LOCK", "IPC_OWNER", "KILL", "LEASE", "LINUX_IMMUTABLE", "MAC_ADMIN", "MAC_OVERRIDE"}
    | {"MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_RAW", "PERFMON", "SETFCAP"}
    | {"SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_BOOT", "SYS_CHROOT", "SYS_MODULE"}
    | {"SYS_NICE", "SYS_PACCT", "SYS_PTRACE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME"}
    | {"SYS_TTY_CONFIG", "SYSLOG", "WAKE_ALARM"}
)
"""Capabilities of Linux 6, without CAP_."""
_Found = tuple[WarningKind, Location, str]


def warnings_of(job: ElasticJob) -> tuple[TemplateWarning, ...]:
    """Return all warnings for a job; those of one kind are in order of the template's fields."""
    document = job.spec.template.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = document["spec"]
    index = job.spec.template.spec.containers.index(job.trainer())
    template = _Template(
        job,
        _mapping(document.get("metadata")),
        spec,
        spec["containers"][index],
        ("containers", index),
    )
    return tuple(
        TemplateWarning(kind, _absolute(location), message)
        for rule in _RULES
        for kind, location, message in rule(template)
    )


def _absolute(location: Location) -> Location:
    """Return a location from the document's root; `..` leads out of the pod's spec."""
    return (*POD_SPEC[:-1], *location[1:]) if location[0] == ".." else (*POD_SPEC, *location)


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[Json]:
    return [_mapping(one) for one in value] if isinstance(value, list) else []


def _containers(spec: Json) -> Iterator[tuple[Location, Json]]:
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(_mappings(spec.get(kind))):
            yield (kind, index), container


# -- the pod


def _host_ipc(template: _Template) -> Iterator[_Found]:
    if template.spec.get("hostIPC") is not True:
        return
    mounts = _mappings(template.trainer.get("volumeMounts"))
    if any(is_same(one.get("mountPath"), SHM_PATH) for one in mounts):
        effect = f"its volume at {SHM_PATH} hides the machine's from the trainer"
    else:
        effect = (
            f"the trainer gets the machine's {SHM_PATH} instead of a volume of its own, with the "
            "machine's limit, and files that outlive the pod"
        )
    yield (
        WarningKind.HOST_IPC,
        ("hostIPC",),
        f"{effect}; remove it unless workers share memory with processes outside the pod",
    )


_QUEUE_NAMES = {
    "volcano": (
        "annotations",
        ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name"),
        ("scheduling.volcano.sh/queue-name",),
    ),
    "scheduler-plugins-scheduler": ("labels", ("scheduling.x-k8s.io/pod-group",), ()),
    "coscheduling": ("labels", ("scheduling.x-k8s.io/pod-group",), ()),
    "kai-scheduler": ("labels", (), ("kai.scheduler/queue", "runai/queue")),
    "yunikorn": ("labels", (), ("queue",)),
}
"""Labels or annotations that name the group, and those that name the queue, by the name under
which a scheduler is usually installed. One of them suffices: a PodGroup has its queue."""
_OTHER_PLACES = {"yunikorn": ("annotations", "yunikorn.apache.org/queue")}


def _scheduler(template: _Template) -> Iterator[_Found]:
    name = template.spec.get("schedulerName")
    if not isinstance(name, str) or name not in _QUEUE_NAMES:
        return
    place, groups, queues = _QUEUE_NAMES[name]
    given = _mapping(template.metadata.get(place))
    other_place, other = _OTHER_PLACES.get(name, (place, ""))
    if any(given.get(key) for key in (*groups, *queues)):
        return
    if _mapping(template.metadata.get(other_place)).get(other):
        return
    missing = "its pod group" if not queues else "its queue" if not groups else "a group or queue"
    effect = (
        f"{name} places each pod by itself"
        if groups
        else f"{name} places the pods in its default queue, or not at all"
    )
    key = (*queues, *groups)[0]
    yield (
        WarningKind.SCHEDULER_WITHOUT_QUEUE,
        ("schedulerName",),
        f"{missing} is not named: {effect}; set {key} in template.metadata.{place}, or remove "
        "schedulerName",
    )


LEAST_MARGIN_SECONDS = 10
"""Time beyond the workers' own grace period below which a warning is due, in seconds: an agent may
take 6 s to leave. The default period adds `MARGIN_SECONDS`."""


def _grace(template: _Template) -> Iterator[_Found]:
    given = template.job.spec.template.spec.termination_grace_period_seconds
    stop = template.job.spec.recovery.stop_grace_seconds
    if given is not None and given < stop + LEAST_MARGIN_SECONDS:
        yield (
            WarningKind.GRACE_TOO_SHORT,
            ("terminationGracePeriodSeconds",),
            f"{given} s are less than recovery.stopGraceSeconds ({stop} s) and "
            f"{LEAST_MARGIN_SECONDS} s for saving and leaving: workers may be killed before they "
            f"have saved; set {stop + MARGIN_SECONDS} or more, or remove it",
        )


def _pod_deadline(template: _Template) -> Iterator[_Found]:
    seconds = template.spec.get("activeDeadlineSeconds")
    if seconds is not None:
        yield (
            WarningKind.POD_DEADLINE,
            ("activeDeadlineSeconds",),
            f"each pod is killed after {seconds} s and replaced, and the job goes on; limit the "
            "job with spec.runPolicy.activeDeadlineSeconds instead",
        )


def _readiness_gates(template: _Template) -> Iterator[_Found]:
    if template.spec.get("readinessGates"):
        yield (
            WarningKind.READINESS_GATES,
            ("readinessGates",),
            f"training does not wait for them, and {_UNREADY}; remove them",
        )


def _labels(template: _Template) -> Iterator[_Found]:
    own = pod_labels(template.job, 0, 0)
    for name in _mapping(template.metadata.get("labels")):
        if name in own:
            yield (
                WarningKind.LABEL_REPLACED,
                ("..", "metadata", "labels", name),
                f"{name} is set by the operator, which finds its pods by it; remove it",
            )


def _selectors(template: _Template) -> Iterator[_Found]:
    """An absent selector matches no pod, unlike an empty one, which matches all."""
    terms: list[tuple[Location, Json]] = [
        (("topologySpreadConstraints", index), one)
        for index, one in enumerate(_mappings(template.spec.get("topologySpreadConstraints")))
    ]
    affinity = _mapping(template.spec.get("affinity"))
    for kind in ("podAffinity", "podAntiAffinity"):
        for when in ("required", "preferred"):
            field = f"{when}DuringSchedulingIgnoredDuringExecution"
            for index, one in enumerate(_mappings(_mapping(affinity.get(kind)).get(field))):
                at: Location = ("affinity", kind, field, index)
                weighted = when == "preferred"
                term = _mapping(one.get("podAffinityTerm")) if weighted else one
                terms.append(((*at, "podAffinityTerm") if weighted else at, term))
    for place, term in terms:
        if term and term.get("labelSelector") is None:
            yield (
                WarningKind.SELECTOR_MISSING,
                place,
                "without labelSelector it counts no pod and has no effect; select the pods of the "
                f"job by the label {JOB_LABEL}",
            )


_BYTES = ("memory", "ephemeral-storage")


def _amounts(template: _Template) -> Iterator[_Found]:
    for at, container in _containers(template.spec):
        for kind in ("limits", "requests"):
            given = _mapping(_mapping(container.get("resources")).get(kind))
            for name in _BYTES:
                amount = given.get(name)
                if isinstance(amount, str) and amount.endswith("m"):
                    yield (
                        WarningKind.FRACTIONAL_BYTES,
                        (*at, "resources", kind, name),
                        f"{amount} is an amount in thousandths of a byte: write it in bytes, or "
                        "with the unit that is meant, such as Mi or Gi",
                    )


# -- the trainer

_UNREADY = (
    "until they pass the job's PodsReady is False and its PodDisruptionBudget does not protect "
    "the pod"
)


def _probes(template: _Template) -> Iterator[_Found]:
    if template.trainer.get("readinessProbe"):
        yield (
            WarningKind.READINESS_PROBE,
            (*template.at, "readinessProbe"),
            f"training does not wait for its successes, and {_UNREADY}; remove it: the agent's own "
            "probe reports that the node has joined",
        )
    for name in ("livenessProbe", "startupProbe"):
        if template.trainer.get(name):
            yield (
                WarningKind.LIVENESS_PROBE,
                (*template.at, name),
                "when it fails the kubelet kills all workers of the node, whose pod is replaced; "
                "remove it, and find hanging workers with spec.recovery.hangTimeoutSeconds",
            )


_SLEEP = re.compile(r"\s*(/\S*/)?sleep\s+(?P<seconds>\d+)s?\s*")


def _pre_stop(template: _Template) -> Iterator[_Found]:
    hook = _mapping(_mapping(template.trainer.get("lifecycle")).get("preStop"))
    seconds, grace = _sleep_seconds(hook), grace_seconds(template.job)
    if seconds is not None and seconds >= grace:
        yield (
            WarningKind.PRE_STOP_TOO_LONG,
            (*template.at, "lifecycle", "preStop"),
            f"it takes {seconds} s and the grace period is {grace} s: the kubelet then leaves the "
            "trainer 2 s to end; shorten it, or raise terminationGracePeriodSeconds",
        )


def _sleep_seconds(hook: Json) -> int | None:
    """Return the duration of a hook that only sleeps; None if it is unknown."""
    seconds = _mapping(hook.get("sleep")).get("seconds")
    if isinstance(seconds, int):
        return seconds
    words = _mapping(hook.get("exec")).get("command")
    if not isinstance(words, list):
        return None
    text = " ".join(map(str, words))
    if len(words) == 3 and words[1] == "-c":
        text = str(words[2])
    found = _SLEEP.fullmatch(text)
    return int(found["seconds"]) if found and len(found["seconds"]) < 10 else None


def _accelerators(template: _Template) -> Iterator[_Found]:
    if str(template.job.spec.nproc_per_node) != "gpu":
        return
    if not requests_devices(template.trainer):
        yield (
            WarningKind.ACCELERATORS_NOT_REQUESTED,
            (*template.at, "resources"),
            "spec.nprocPerNode is gpu and no accelerator is requested: the scheduler may choose a "
            "machine without one; add a limit such as nvidia.com/gpu",
        )


_OF_WORKERS = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
    }
)


def _variables(template: _Template) -> Iterator[_Found]:
    for index, variable in enumerate(_mappings(template.trainer.get("env"))):
        if variable.get("name") in _OF_WORKERS:
            yield (
                WarningKind.VARIABLE_REPLACED,
                (*template.at, "env", index, "name"),
                f"{variable['name']} is set anew for each worker in every round: workers do not "
                "see this value; remove it",
            )


# -- containers and volumes


def _images(template: _Template) -> Iterator[_Found]:
    for at, container in _containers(template.spec):
        image = container.get("image")
        if container.get("imagePullPolicy") == "IfNotPresent" and _floats(image):
            yield (
                WarningKind.FLOATING_IMAGE,
                (*at, "image"),
                "without a fixed tag each machine keeps the image that it pulled first, so that "
                "nodes of one job may run different ones; name a tag other than latest, or a "
                "digest",
            )


def _floats(image: object) -> bool:
    """Return True for an image without a tag or digest, or with tag latest."""
    if not isinstance(image, str) or not image or "@" in image:
        return False
    tag = image.rpartition("/")[2].partition(":")[2]
    return tag in ("", "latest")


def _capabilities(template: _Template) -> Iterator[_Found]:
    """Names are those of Linux without CAP_; the runtime ignores others or fails."""
    for at, container in _containers(template.spec):
        given = _mapping(_mapping(container.get("securityContext")).get("capabilities"))
        for kind in ("add", "drop"):
            names = given.get(kind)
            for index, name in enumerate(names if isinstance(names, list) else ()):
                if isinstance(name, str) and name.upper() not in _CAPABILITIES:
                    known = name.upper().removeprefix("CAP_") in _CAPABILITIES
                    remedy = "write it without CAP_" if known else "see capabilities(7)"
                    yield (
                        WarningKind.UNKNOWN_CAPABILITY,
                        (*at, "securityContext", "capabilities", kind, index),
                        f"{echoed(name)} is no capability of Kubernetes: container runtimes ignore "
                        f"it or do not start the container; {remedy}",
                    )


def _host_ports(template: _Template) -> Iterator[_Found]:
    if not template.several or _is_spread(template.spec):
        return
    on_host = template.spec.get("hostNetwork") is True
    for at, container in _containers(template.spec):
        for index, port in enumerate(_mappings(container.get("ports"))):
            field = "containerPort" if on_host else "hostPort"
            if port.get(field):
                yield (
                    WarningKind.HOST_PORT,
                    (*at, "ports", index, field),
                    f"port {port[field]} of a machine can be used by one pod: two nodes of the job "
                    "never run on one machine, and those without a machine stay Pending; remove "
                    "the port, or require the spread with podAntiAffinity",
                )


def _is_spread(spec: Json) -> bool:
    """Return True if the template itself allows one pod per machine only."""
    against = _mapping(_mapping(spec.get("affinity")).get("podAntiAffinity"))
    terms = _mappings(against.get("requiredDuringSchedulingIgnoredDuringExecution"))
    return any(term.get("topologyKey") == "kubernetes.io/hostname" for term in terms)


def _volumes(template: _Template) -> Iterator[_Found]:
    for index, volume in enumerate(_mappings(template.spec.get("volumes"))):
        empty, host = _mapping(volume.get("emptyDir")), _mapping(volume.get("hostPath"))
        limit = empty.get("sizeLimit")
        if empty.get("medium") == "Memory" and not (limit and quantity(limit)):
            yield (
                WarningKind.MEMORY_VOLUME_WITHOUT_LIMIT,
                ("volumes", index, "emptyDir"),
                "its files count towards the memory limits of the containers that write them, and "
                "may fill the machine's memory; set sizeLimit",
            )
        if host.get("type") == "DirectoryOrCreate" and _is_written(template, volume.get("name")):
            yield (
                WarningKind.HOST_PATH_PER_MACHINE,
                ("volumes", index, "hostPath"),
                "each machine has its own, possibly empty folder, shared by the pods on it: a node "
                "that moves to another machine does not find its files; use a PersistentVolumeClaim"
                " for checkpoints, or readOnly mounts",
            )


def _is_written(template: _Template, volume: object) -> bool:
    mounts = _mappings(template.trainer.get("volumeMounts"))
    return any(one.get("name") == volume and one.get("readOnly") is not True for one in mounts)


def _snapshots(template: _Template) -> Iterator[_Found]:
    snapshots = template.job.spec.recovery.snapshots
    limit = quantity(amounts(template.trainer, "limits").get("memory"))
    if snapshots is None or not snapshots.enabled or not limit or not snapshots.memory_limit:
        return
    if memory_bytes(snapshots) >= limit:
        yield (
            WarningKind.SNAPSHOT_MEMORY,
            (*template.at, "resources", "limits", "memory"),
            f"snapshots count towards it, and recovery.snapshots.memoryLimit "
            f"({snapshots.memory_limit}) leaves nothing for the workers, which may be killed; add "
            "the memory of the workers, or lower memoryLimit to a little more than two snapshots",
        )


_RULES: tuple[Callable[[_Template], Iterable[_Found]], ...] = (
    _scheduler,
    _host_ipc,
    _grace,
    _pod_deadline,
    _readiness_gates,
    _labels,
    _selectors,
    _amounts,
    _probes,
    _pre_stop,
    _accelerators,
    _variables,
    _images,
    _capabilities,
    _host_ports,
    _volumes,
    _snapshots,
)
