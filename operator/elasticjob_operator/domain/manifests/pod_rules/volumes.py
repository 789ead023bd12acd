"""Rules of volumes and of their sources."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.environment import (
    amount_reference_faults,
    field_faults,
)
from elasticjob_operator.domain.manifests.pod_rules.fields import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    LABEL_VALUE,
    QUALIFIED_NAME,
    Fault,
    Field,
    backstep_faults,
    exactly_one,
    in_range,
    must_be_set,
    quantity,
    relative_path_faults,
)
from elasticjob_rendezvous.protocol.text import echoed

SOURCES = (
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
)
"""Kinds of volumes. If several are set, the API server assumes the first one in this order."""
_NEEDED: dict[str, tuple[str, ...]] = {
    "awsElasticBlockStore": ("volumeID",),
    "azureDisk": ("diskName", "diskURI"),
    "azureFile": ("secretName", "shareName"),
    "cephfs": ("monitors",),
    "cinder": ("volumeID",),
    "configMap": ("name",),
    "flexVolume": ("driver",),
    "gcePersistentDisk": ("pdName",),
    "glusterfs": ("endpoints", "path"),
    "hostPath": ("path",),
    "image": ("reference",),
    "nfs": ("server",),
    "persistentVolumeClaim": ("claimName",),
    "portworxVolume": ("volumeID",),
    "rbd": ("monitors", "image"),
    "secret": ("secretName",),
    "vsphereVolume": ("volumePath",),
}
"""Fields that must not be empty, by kind of volume."""
_PROJECTED = (
    "secret",
    "configMap",
    "downwardAPI",
    "serviceAccountToken",
    "clusterTrustBundle",
    "podCertificate",
)
_MOST_MODE = 0o777
_TOKEN_SECONDS = (600, 2**32)


def volume_faults(spec: Field) -> Iterator[Fault]:
    for volume in spec.items("volumes"):
        yield from DNS_LABEL.faults(volume.child("name"))
        yield from exactly_one(volume, SOURCES, _source_faults)


def _source_faults(source: Field) -> Iterator[Fault]:
    kind = str(source.location[-1])
    for name in _NEEDED.get(kind, ()):
        yield from must_be_set(source.child(name))
    yield from in_range(source.child("defaultMode"), 0, _MOST_MODE)
    match kind:
        case "emptyDir":
            limit = source.child("sizeLimit")
            if limit.present and quantity(limit.value) < 0:
                yield limit.fault(f"must be at least 0; got {limit.value}")
        case "hostPath":
            yield from backstep_faults(source.child("path"))
        case "nfs":
            path = source.child("path")
            if not path.text.startswith("/"):
                yield path.fault(f"must be an absolute path; got {echoed(path.text)}")
        case "secret" | "configMap":
            yield from _item_faults(source)
        case "downwardAPI":
            yield from _downward_faults(source)
        case "projected":
            for projected in source.items("sources"):
                yield from _projected_faults(projected)
        case "csi":
            yield from DNS_SUBDOMAIN.faults(
                source.child("driver"), source.child("driver").text.lower()
            )
            if source.child("nodePublishSecretRef").present:
                yield from must_be_set(source.child("nodePublishSecretRef", "name"))
        case "ephemeral":
            yield from _claim_faults(source.child("volumeClaimTemplate"))


def _item_faults(source: Field) -> Iterator[Fault]:
    for item in source.items("items"):
        yield from must_be_set(item.child("key"))
        yield from _file_faults(item)


def _file_faults(item: Field) -> Iterator[Fault]:
    path = item.child("path")
    yield from must_be_set(path)
    yield from relative_path_faults(path)
    if path.text.startswith("..") and not path.text.startswith("../") and path.text != "..":
        yield path.fault(f"must not begin with '..'; got {echoed(path.text)}")
    yield from in_range(item.child("mode"), 0, _MOST_MODE)


def _downward_faults(source: Field) -> Iterator[Fault]:
    for item in source.items("items"):
        yield from _file_faults(item)
        field, amount = item.child("fieldRef"), item.child("resourceFieldRef")
        if field.present:
            yield from field_faults(field, in_file=True)
            if amount.present:
                yield item.fault("must have either fieldRef or resourceFieldRef")
        elif amount.present:
            yield from amount_reference_faults(amount, in_file=True)
        else:
            yield item.fault("must have fieldRef or resourceFieldRef")


def _projected_faults(projected: Field) -> Iterator[Fault]:
    def faults_of(found: Field) -> Iterator[Fault]:
        match found.location[-1]:
            case "secret" | "configMap":
                yield from must_be_set(found.child("name"))
                yield from _item_faults(found)
            case "downwardAPI":
                yield from _downward_faults(found)
            case "serviceAccountToken":
                yield from must_be_set(found.child("path"))
                yield from in_range(found.child("expirationSeconds"), *_TOKEN_SECONDS)

    yield from exactly_one(projected, _PROJECTED, faults_of)


def _claim_faults(template: Field) -> Iterator[Fault]:
    if not template.present:
        yield template.fault("must be set")
        return
    for label, value in template.entries("metadata", "labels"):
        yield from QUALIFIED_NAME.faults(value, label)
        yield from LABEL_VALUE.faults(value)
    for name in ("name", "generateName", "namespace"):
        if template.child("metadata", name).value:
            yield template.child("metadata", name).fault(
                "must be absent: the claim is named by its pod"
            )
    spec = template.child("spec")
    modes = spec.child("accessModes")
    yield from must_be_set(modes)
    if "ReadWriteOncePod" in (modes.value or ()) and len(set(modes.value)) > 1:
        yield modes.fault("must not have other modes beside ReadWriteOncePod")
    storage = spec.child("resources", "requests", "storage")
    if not storage.present:
        yield storage.fault("must be set")
    elif quantity(storage.value) <= 0:
        yield storage.fault(f"must be more than 0; got {storage.value}")
    if spec.child("storageClassName").value:
        yield from DNS_SUBDOMAIN.faults(spec.child("storageClassName"))
