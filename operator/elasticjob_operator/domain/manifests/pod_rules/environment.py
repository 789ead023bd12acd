"""Rules of a container's environment variables and of their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.fields import (
    CONFIG_KEY,
    DNS_LABEL,
    DNS_SUBDOMAIN,
    QUALIFIED_NAME,
    VARIABLE,
    Fault,
    Field,
    backstep_faults,
    exactly_one,
    must_be_set,
    quantity,
)

_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
_VARIABLE_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)
_FILE_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.labels",
    "metadata.annotations",
    "metadata.uid",
)
_AMOUNTS = tuple(
    f"{kind}.{name}"
    for kind in ("limits", "requests")
    for name in ("cpu", "memory", "ephemeral-storage")
)
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['(.*)'\]")
_CPU_DIVISORS = ("1m", "1")
_DIVISORS = ("1", *(f"1{unit}{binary}" for unit in "kMGTPE" for binary in ("", "i") if unit != "k"))


def environment_faults(spec: Field, container: Field) -> Iterator[Fault]:
    for variable in container.items("env"):
        yield from VARIABLE.faults(variable.child("name"))
        source = variable.child("valueFrom")
        if source.present:
            yield from _source_faults(spec, source)
            if variable.child("value").value:
                yield source.fault("must be absent: value is set, and only one may be")
    for source in container.items("envFrom"):
        if source.child("prefix").value:
            yield from VARIABLE.faults(source.child("prefix"))
        kinds = ("configMapRef", "secretRef")
        if not any(source.child(kind).present for kind in kinds):
            yield source.fault("must have configMapRef or secretRef")
        yield from exactly_one(
            source, kinds, lambda found: DNS_SUBDOMAIN.faults(found.child("name"))
        )


def _source_faults(spec: Field, source: Field) -> Iterator[Fault]:
    if not any(source.child(kind).present for kind in _SOURCES):
        yield source.fault(f"must have one of {', '.join(_SOURCES)}")

    def faults_of(found: Field) -> Iterator[Fault]:
        match found.location[-1]:
            case "fieldRef":
                yield from field_faults(found, in_file=False)
            case "resourceFieldRef":
                yield from amount_reference_faults(found)
            case "fileKeyRef":
                yield from _file_faults(spec, found)
            case _:
                yield from DNS_SUBDOMAIN.faults(found.child("name"))
                yield from CONFIG_KEY.faults(found.child("key"))

    yield from exactly_one(source, _SOURCES, faults_of)


def field_faults(reference: Field, *, in_file: bool) -> Iterator[Fault]:
    """Yield the faults of a reference to a field of the pod, in a variable or in a file."""
    path = reference.child("fieldPath")
    known = _FILE_FIELDS if in_file else _VARIABLE_FIELDS
    if reference.child("apiVersion").value not in (None, "", "v1"):
        yield path.fault("must be a field of apiVersion v1")
    elif match := _SUBSCRIPT.fullmatch(path.text):
        kind, name = match.groups()
        yield from QUALIFIED_NAME.faults(path, name.lower() if kind == "annotations" else name)
    elif path.text not in known:
        more = "metadata.labels['…'] or metadata.annotations['…']"
        yield path.fault(f"must be one of {', '.join(known)}, {more}; got {path.text!r}")


def amount_reference_faults(reference: Field, *, in_file: bool = False) -> Iterator[Fault]:
    """Yield the faults of a reference to a container's resources."""
    if in_file:
        yield from must_be_set(reference.child("containerName"))
    resource, divisor = reference.child("resource"), reference.child("divisor")
    huge = resource.text.startswith(("limits.hugepages-", "requests.hugepages-"))
    if resource.text not in _AMOUNTS and not huge:
        yield resource.fault(f"must be one of {', '.join(_AMOUNTS)}; got {resource.text!r}")
        return
    allowed = _CPU_DIVISORS if resource.text.endswith(".cpu") else _DIVISORS
    if divisor.value and quantity(divisor.value) not in (0, *map(quantity, allowed)):
        yield divisor.fault(f"must be one of {', '.join(allowed)}; got {divisor.value}")


def _file_faults(spec: Field, reference: Field) -> Iterator[Fault]:
    yield from VARIABLE.faults(reference.child("key"))
    name = reference.child("volumeName")
    yield from DNS_LABEL.faults(name)
    yield from must_be_set(reference.child("path"))
    yield from backstep_faults(reference.child("path"))
    volumes = [
        volume for volume in spec.items("volumes") if volume.child("name").value == name.value
    ]
    if not volumes or not volumes[0].child("emptyDir").present:
        yield name.fault("must be the name of an emptyDir volume")
