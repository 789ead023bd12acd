"""Rules of the kubelet and the container runtime, which the API server does not check.

A pod that violates one is created and scheduled, and its containers never start. Sources: the
kubelet's `pkg/kubelet/kuberuntime` and `pkg/volume/emptydir`, the OCI runtime specification, and
the grammar of image references in `github.com/distribution/reference`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.fields import Fault, Field
from elasticjob_operator.model.problems import Location
from elasticjob_rendezvous.protocol.text import echoed

_COMPONENT = "[a-z0-9]+(?:(?:[.]|_{1,2}|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(f"{_COMPONENT}(?:/{_COMPONENT})*")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_ALGORITHM = "[A-Za-z][A-Za-z0-9]*"
_DIGEST = re.compile(rf"{_ALGORITHM}(?:[-_+.]{_ALGORITHM})*:[0-9a-fA-F]{{32,}}")
_HEXADECIMAL = re.compile("[0-9a-f]{64}")
_DIGEST_CHARACTERS = {"sha256": 64, "sha384": 96, "sha512": 128}
_MOST_NAME = 255
_PAGES = "HugePages"


def kubelet_faults(spec: Field) -> Iterator[Fault]:
    """Yield the faults of a pod's spec that passed the rules of the API server."""
    containers = [*spec.items("containers"), *spec.items("initContainers")]
    for container in containers:
        yield from _image_faults(container.child("image"))
        yield from _user_faults(spec, container)
        directory = container.child("workingDir")
        if directory.value and not directory.text.startswith("/"):
            yield directory.fault(f"must be an absolute path; got {echoed(directory.text)}")
    pages = {
        name.removeprefix("hugepages-")
        for holder in (spec, *containers)
        for kind in ("requests", "limits")
        for name, _ in holder.entries("resources", kind)
        if name.startswith("hugepages-")
    }
    for volume in spec.items("volumes"):
        yield from _image_faults(volume.child("image", "reference"))
        yield from _medium_faults(volume.child("emptyDir", "medium"), pages)


def image_name_fault(reference: str) -> str | None:
    """Return the part of an image reference that is invalid, with its rule; None if it is valid."""
    name, at, digest = reference.partition("@")
    if at and not _is_digest(digest):
        return f"digest {echoed(digest)}: must be like sha256: and 64 hexadecimal digits"
    rest, _, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        return (
            f"tag {echoed(tag)}: must have letters, digits, '_', '-' and '.', not '-' or '.' "
            "first, at most 128 characters"
        )
    name = f"{rest}/{last}" if rest else last
    first, slash, path = name.partition("/")
    if slash and (first == "localhost" or re.search("[.:A-Z]", first)):
        if not _REGISTRY.fullmatch(first):
            return f"registry {echoed(first)}: must be like registry.example.com:5000"
    else:
        path = name
    if not _REPOSITORY.fullmatch(path):
        return (
            f"repository {echoed(path)}: must have lower-case letters, digits, '-', '_' and '.', "
            "with '/' between its parts and a letter or digit at the ends of each"
        )
    if len(name) > _MOST_NAME:
        return f"name: must have at most {_MOST_NAME} characters; it has {len(name)}"
    if not slash and not at and _HEXADECIMAL.fullmatch(path):
        return f"repository {echoed(path)}: must not be an image's ID"
    return None


def _is_digest(text: str) -> bool:
    algorithm, _, encoded = text.partition(":")
    wanted = _DIGEST_CHARACTERS.get(algorithm, len(encoded))
    return _DIGEST.fullmatch(text) is not None and len(encoded) == wanted


def _image_faults(image: Field) -> Iterator[Fault]:
    if image.value and image.text == image.text.strip() and (found := image_name_fault(image.text)):
        yield image.fault(f"must be an image reference; its {found}")


def _user_faults(spec: Field, container: Field) -> Iterator[Fault]:
    """Yield a fault if the container's own or its pod's user is root and must not be."""
    contexts = [container.child("securityContext"), spec.child("securityContext")]
    named = [context.child("runAsUser") for context in contexts]
    must_not = [context.child("runAsNonRoot") for context in contexts]
    user = next((field for field in named if field.present), None)
    barred = next((field for field in must_not if field.present), None)
    if user is not None and user.value == 0 and barred is not None and barred.value:
        yield user.fault(f"must not be 0 with {_path(barred.location)}: true")


def _path(location: Location) -> str:
    """Return the last two names of a location."""
    return ".".join(str(name) for name in location[-2:])


def _medium_faults(medium: Field, pages: set[str]) -> Iterator[Fault]:
    if not medium.value or medium.value == "Memory":
        return
    kind, dash, size = medium.text.partition("-")
    if kind != _PAGES or (dash and not size):
        yield medium.fault(
            f"must be empty, Memory, HugePages or HugePages-SIZE; got {echoed(medium.text)}"
        )
    elif dash and size not in pages:
        yield medium.fault(f"must be the size of huge pages that a container requests: {size}")
    elif not dash and len(pages) != 1:
        yield medium.fault("must be HugePages-SIZE unless the containers request one size of pages")
