"""Warnings for the trainer, the other containers, and the volumes of a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticjob_launcher.command_line.environment import clearing
from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.resources import amounts, quantity, requests_devices
from elasticjob_operator.domain.manifests.snapshots import memory_bytes
from elasticjob_operator.domain.manifests.template_warnings.template import (
    UNREADY,
    Found,
    Template,
    WarningKind,
    containers,
    mapping,
    mappings,
)
from elasticjob_operator.domain.plan.lifecycle import grace_seconds
from elasticjob_rendezvous.protocol.text import echoed


def probes(template: Template) -> Iterator[Found]:
    if template.trainer.get("readinessProbe"):
        yield (
            WarningKind.READINESS_PROBE,
            (*template.at, "readinessProbe"),
            f"training does not wait for its successes, and {UNREADY}; remove it: the agent's own "
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


def pre_stop(template: Template) -> Iterator[Found]:
    hook = mapping(mapping(template.trainer.get("lifecycle")).get("preStop"))
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
    seconds = mapping(hook.get("sleep")).get("seconds")
    if isinstance(seconds, int):
        return seconds
    words = mapping(hook.get("exec")).get("command")
    if not isinstance(words, list):
        return None
    text = " ".join(map(str, words))
    if len(words) == 3 and words[1] == "-c":
        text = str(words[2])
    found = _SLEEP.fullmatch(text)
    return int(found["seconds"]) if found and len(found["seconds"]) < 10 else None


def accelerators(template: Template) -> Iterator[Found]:
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


def variables(template: Template) -> Iterator[Found]:
    for index, variable in enumerate(mappings(template.trainer.get("env"))):
        if variable.get("name") in _OF_WORKERS:
            yield (
                WarningKind.VARIABLE_REPLACED,
                (*template.at, "env", index, "name"),
                f"{variable['name']} is set for each worker in every round: workers do not "
                "see this value; remove it",
            )


def environment(template: Template) -> Iterator[Found]:
    spec, trainer = template.job.spec, template.job.trainer()
    if spec.max_nodes == 1 and spec.nproc_per_node == 1:
        return
    found = clearing((*(trainer.command or spec.entrypoint), *(trainer.args or ())))
    if found is not None:
        field = "command" if trainer.command else "args"
        yield WarningKind.ENVIRONMENT_CLEARED, (*template.at, field), found.text


def snapshots(template: Template) -> Iterator[Found]:
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


_BYTES = ("memory", "ephemeral-storage")


def fractional_bytes(template: Template) -> Iterator[Found]:
    for at, container in containers(template.spec):
        for kind in ("limits", "requests"):
            given = mapping(mapping(container.get("resources")).get(kind))
            for name in _BYTES:
                amount = given.get(name)
                if isinstance(amount, str) and amount.endswith("m"):
                    yield (
                        WarningKind.FRACTIONAL_BYTES,
                        (*at, "resources", kind, name),
                        f"{amount} is an amount in thousandths of a byte: write it in bytes, or "
                        "with the unit that is meant, such as Mi or Gi",
                    )


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


def images(template: Template) -> Iterator[Found]:
    for at, container in containers(template.spec):
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


def capabilities(template: Template) -> Iterator[Found]:
    """Yield unknown capabilities: names are those of Linux without CAP_."""
    for at, container in containers(template.spec):
        given = mapping(mapping(container.get("securityContext")).get("capabilities"))
        for kind in ("add", "drop"):
            names = given.get(kind)
            for index, name in enumerate(names if isinstance(names, list) else ()):
                if isinstance(name, str) and name.upper() not in _CAPABILITIES:
                    known = name.upper().removeprefix("CAP_") in _CAPABILITIES
                    remedy = "write it without CAP_" if known else "see capabilities(7)"
                    yield (
                        WarningKind.UNKNOWN_CAPABILITY,
                        (*at, "securityContext", "capabilities", kind, index),
                        f"{echoed(name)} is not a capability of Kubernetes: container runtimes "
                        f"ignore it or do not start the container; {remedy}",
                    )


def host_ports(template: Template) -> Iterator[Found]:
    if not template.several or _is_spread(template.spec):
        return
    on_host = template.spec.get("hostNetwork") is True
    for at, container in containers(template.spec):
        for index, port in enumerate(mappings(container.get("ports"))):
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
    against = mapping(mapping(spec.get("affinity")).get("podAntiAffinity"))
    terms = mappings(against.get("requiredDuringSchedulingIgnoredDuringExecution"))
    return any(term.get("topologyKey") == "kubernetes.io/hostname" for term in terms)


def volumes(template: Template) -> Iterator[Found]:
    for index, volume in enumerate(mappings(template.spec.get("volumes"))):
        empty, host = mapping(volume.get("emptyDir")), mapping(volume.get("hostPath"))
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


def _is_written(template: Template, volume: object) -> bool:
    mounts = mappings(template.trainer.get("volumeMounts"))
    return any(
        mount.get("name") == volume and mount.get("readOnly") is not True for mount in mounts
    )
