"""Rules of containers and init containers."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.amounts import amount_faults
from elasticjob_operator.domain.manifests.pod_rules.environment import environment_faults
from elasticjob_operator.domain.manifests.pod_rules.fields import (
    HEADER_NAME,
    MOST_ID,
    MOST_PORT,
    PORT_NAME,
    Fault,
    Field,
    backstep_faults,
    exactly_one,
    in_range,
    must_be_set,
    not_negative,
    port_faults,
    relative_path_faults,
    unique,
)
from elasticjob_operator.domain.manifests.pod_rules.pod_spec import profile_faults

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_COUNTS = (
    "initialDelaySeconds",
    "timeoutSeconds",
    "periodSeconds",
    "successThreshold",
    "failureThreshold",
)
_BLOCK_SOURCES = ("persistentVolumeClaim", "ephemeral")
"""Kinds of volumes that may be block devices."""


def container_faults(spec: Field, grace_seconds: int) -> Iterator[Fault]:
    containers, init = spec.items("containers"), spec.items("initContainers")
    for container in (*containers, *init):
        yield from _common_faults(spec, container)
    for container in containers:
        yield from _running_faults(container, grace_seconds)
    for container in init:
        if container.child("restartPolicy").value == "Always":
            yield from _running_faults(container, grace_seconds)
        else:
            yield from _one_shot_faults(container)
    yield from _host_port_faults(spec, containers)
    for container in init:
        yield from _host_port_faults(spec, [container])


def _common_faults(spec: Field, container: Field) -> Iterator[Fault]:
    image = container.child("image")
    yield from must_be_set(image)
    if image.text != image.text.strip():
        yield image.fault("must not begin or end with a space")
    yield from _port_list_faults(container.items("ports"))
    yield from environment_faults(spec, container)
    yield from _mount_faults(spec, container)
    yield from _device_faults(spec, container)
    claims = [claim.child("name").text for claim in spec.items("resourceClaims")]
    yield from amount_faults(container.child("resources"), claims)
    yield from _security_faults(spec, container.child("securityContext"))
    for policy in container.items("resizePolicy"):
        if policy.child("resourceName").value not in ("cpu", "memory"):
            yield policy.child("resourceName").fault("must be cpu or memory")
        if policy.child("restartPolicy").value == "RestartContainer":
            yield policy.child("restartPolicy").fault(
                "must be NotRequired: containers of a job are not restarted"
            )


def _port_list_faults(ports: list[Field]) -> Iterator[Fault]:
    for port in ports:
        if port.child("name").value:
            yield from PORT_NAME.faults(port.child("name"))
        yield from in_range(port.child("containerPort"), 1, MOST_PORT)
        yield from in_range(port.child("hostPort"), 0, MOST_PORT)
    yield from unique([port.child("name") for port in ports])


def _host_port_faults(spec: Field, containers: list[Field]) -> Iterator[Fault]:
    """Yield repeated ports of the host; with the host's network every port is one."""
    own_network = not spec.child("hostNetwork").value
    taken: set[tuple[str, str, int]] = set()
    for container in containers:
        for port in container.items("ports"):
            number = port.child("hostPort").value or 0
            inner = port.child("containerPort").value
            if not own_network and number not in (0, inner):
                yield port.child("hostPort").fault(
                    f"must be containerPort {inner} with hostNetwork; got {number}"
                )
            if not (number := number or (0 if own_network else inner)):
                continue
            address = port.child("hostIP").text
            key = (port.child("protocol").text or "TCP", address, number)
            if key in taken:
                yield port.child("hostPort").fault(f"must be unique; {number} is used before")
            taken.add(key)


def _mount_faults(spec: Field, container: Field) -> Iterator[Fault]:
    volumes = {volume.child("name").text for volume in spec.items("volumes")}
    devices = container.items("volumeDevices")
    named = {device.child("name").text for device in devices}
    paths = {device.child("devicePath").text for device in devices}
    privileged = container.child("securityContext", "privileged").value is True
    for mount in container.items("volumeMounts"):
        name, path = mount.child("name"), mount.child("mountPath")
        yield from _volume_is_known(name, volumes)
        yield from must_be_set(path)
        if name.text in named:
            yield name.fault("must not be in volumeDevices too")
        if path.text in paths:
            yield path.fault("must not be the path of a volume device too")
        inner, expression = mount.child("subPath"), mount.child("subPathExpr")
        for sub in (inner, expression):
            if sub.value:
                yield from relative_path_faults(sub)
        if inner.value and expression.value:
            yield expression.fault("must be absent: subPath is set, and only one may be")
        propagation = mount.child("mountPropagation")
        if propagation.value == "Bidirectional" and not privileged:
            yield propagation.fault("must not be Bidirectional: the container is not privileged")
        yield from _recursion_faults(mount)


def _volume_is_known(name: Field, volumes: set[str]) -> Iterator[Fault]:
    if not name.value:
        yield name.fault("must be set")
    elif name.text not in volumes:
        known = ", ".join(sorted(volume for volume in volumes if volume)) or "none"
        yield name.fault(f"must be the name of a volume; got {name.text!r}, volumes are: {known}")


def _recursion_faults(mount: Field) -> Iterator[Fault]:
    recursive = mount.child("recursiveReadOnly")
    if recursive.value in ("Enabled", "IfPossible"):
        if not mount.child("readOnly").value:
            yield recursive.fault("must be absent unless readOnly is true")
        if mount.child("mountPropagation").value not in (None, "None"):
            yield recursive.fault("must be absent unless mountPropagation is None")


def _device_faults(spec: Field, container: Field) -> Iterator[Fault]:
    sources = {volume.child("name").text: volume for volume in spec.items("volumes")}
    devices = container.items("volumeDevices")
    for device in devices:
        name, path = device.child("name"), device.child("devicePath")
        yield from _volume_is_known(name, set(sources))
        if (volume := sources.get(name.text)) and not any(
            volume.child(kind).present for kind in _BLOCK_SOURCES
        ):
            yield name.fault("must be the name of a persistent volume claim")
        yield from must_be_set(path)
        yield from backstep_faults(path)
    yield from unique([device.child("name") for device in devices])


def _security_faults(spec: Field, context: Field) -> Iterator[Fault]:
    for name in ("runAsUser", "runAsGroup"):
        yield from in_range(context.child(name), 0, MOST_ID)
    yield from profile_faults(context)
    if context.child("allowPrivilegeEscalation").value is False:
        if context.child("privileged").value:
            yield context.fault("must not have allowPrivilegeEscalation: false with privileged")
        if "CAP_SYS_ADMIN" in (context.child("capabilities", "add").value or ()):
            yield context.fault("must not have allowPrivilegeEscalation: false with CAP_SYS_ADMIN")
    masked = context.child("procMount")
    if masked.value == "Unmasked" and spec.child("hostUsers").value is not False:
        yield masked.fault("must not be Unmasked unless hostUsers is false")


def _one_shot_faults(container: Field) -> Iterator[Fault]:
    for name in ("lifecycle", *_PROBES):
        if container.child(name).present:
            yield container.child(name).fault(
                "must be absent in an init container without restartPolicy: Always"
            )
    rules = container.child("restartPolicyRules")
    if rules.value and not container.child("restartPolicy").present:
        yield container.child("restartPolicy").fault("must be set with restartPolicyRules")


def _running_faults(container: Field, grace_seconds: int) -> Iterator[Fault]:
    for hook in ("postStart", "preStop"):
        handler = container.child("lifecycle", hook)
        if handler.present:
            yield from _handler_faults(handler, grace_seconds)
    for kind in _PROBES:
        probe = container.child(kind)
        if probe.present:
            yield from _probe_faults(probe, kind, grace_seconds)


def _probe_faults(probe: Field, kind: str, grace_seconds: int) -> Iterator[Fault]:
    yield from _handler_faults(probe, grace_seconds)
    for count in _COUNTS:
        yield from not_negative(probe.child(count))
    successes = probe.child("successThreshold")
    if kind != "readinessProbe" and successes.value not in (None, 0, 1):
        yield successes.fault(f"must be 1 in a {kind}; got {successes.value}")
    grace = probe.child("terminationGracePeriodSeconds")
    if grace.present and kind == "readinessProbe":
        yield grace.fault("must be absent in a readinessProbe")
    elif grace.present and grace.value <= 0:
        yield grace.fault(f"must be at least 1; got {grace.value}")


def _handler_faults(handler: Field, grace_seconds: int) -> Iterator[Fault]:
    kinds = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
    if not any(handler.child(kind).present for kind in kinds):
        yield handler.fault("must have an action: exec, httpGet or tcpSocket")

    def faults_of(action: Field) -> Iterator[Fault]:
        match action.location[-1]:
            case "exec":
                yield from must_be_set(action.child("command"))
            case "httpGet":
                yield from port_faults(action.child("port"))
                for header in action.items("httpHeaders"):
                    yield from HEADER_NAME.faults(header.child("name"))
            case "sleep":
                yield from in_range(action.child("seconds"), 0, grace_seconds)
            case _:
                yield from port_faults(action.child("port"))

    yield from exactly_one(handler, kinds, faults_of)
