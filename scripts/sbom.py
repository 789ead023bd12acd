"""Bills of materials of the built images, in CycloneDX: `python -m scripts.sbom FOLDER`.

The contents are read from the image archives that `make images` writes: the metadata of every
Python package, the status file of dpkg, and the base image's name. `--release` fails unless the
Python packages are exactly those of the lock and the base image is named by its digest.
"""

from __future__ import annotations

import argparse
import email
import json
import re
import sys
import tarfile
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from scripts.environment import LOCKS
from scripts.licences import IMAGES, expression, policy
from scripts.lock import read
from tests.cluster.places import ARCHIVES

BASE = "org.opencontainers.image.base.name"
OWN = "/opt/elasticjob/"
"""Folder of the packages that this repository puts into an image."""
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_WHITEOUT = ".wh."


@dataclass(slots=True)
class Contents:
    """Packages of an image, and its settings."""

    name: str
    settings: dict[str, Any]
    python: dict[str, Message] = field(default_factory=dict)  # by path
    debian: list[dict[str, str]] = field(default_factory=list)
    system: str = ""  # `ID` and `VERSION_ID` of os-release, such as debian-12

    def own(self) -> dict[str, str]:
        """Return the versions of the Python packages that this repository installs."""
        return {
            canonical(found["Name"]): found["Version"]
            for path, found in self.python.items()
            if path.startswith(OWN)
        }

    @property
    def base(self) -> str:
        """Name of the base image, empty if unknown."""
        return str((self.settings.get("Labels") or {}).get(BASE, ""))


def canonical(name: str) -> str:
    """Return the normalised name of a Python package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def contents(archive: Path) -> Contents:
    """Return the packages of an image in a docker archive."""
    with tarfile.open(archive) as outer:
        manifest = json.loads(_member(outer, "manifest.json"))[0]
        config = json.loads(_member(outer, manifest["Config"]))
        files: dict[str, bytes] = {}
        for layer in manifest["Layers"]:
            handle = outer.extractfile(layer)
            if handle is None:
                raise ValueError(f"{archive}: {layer} is not a file")
            with tarfile.open(fileobj=handle) as inner:
                _apply(inner, files)
    found = Contents(manifest["RepoTags"][0], config.get("config", {}))
    for path, content in sorted(files.items()):
        if path.endswith("/METADATA"):
            found.python[path] = email.message_from_bytes(content)
        elif path == "/etc/os-release" or (path == "/usr/lib/os-release" and not found.system):
            lines = dict(
                line.split("=", 1) for line in content.decode().splitlines() if "=" in line
            )
            release = (lines.get("ID", ""), lines.get("VERSION_ID", ""))
            found.system = "-".join(part.strip('"') for part in release if part)
        elif path == "/var/lib/dpkg/status":
            found.debian += _debian(content.decode())
    return found


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    handle = archive.extractfile(name)
    if handle is None:
        raise ValueError(f"{name} of the image is not a file")
    return handle.read()


def _apply(layer: tarfile.TarFile, files: dict[str, bytes]) -> None:
    """Add a layer's files of interest, and remove those that it hides."""
    for entry in layer:
        path = PurePosixPath("/", entry.name.removeprefix("./"))
        if path.name.startswith(_WHITEOUT):
            hidden = str(path.parent / path.name.removeprefix(_WHITEOUT))
            if path.name == ".wh..wh..opq":
                hidden = f"{path.parent}/"
            inside = f"{hidden.rstrip('/')}/"
            for known in [one for one in files if one == hidden or one.startswith(inside)]:
                del files[known]
        elif entry.isfile() and _is_wanted(path):
            handle = layer.extractfile(entry)
            files[str(path)] = handle.read() if handle else b""


def _is_wanted(path: PurePosixPath) -> bool:
    if path.name == "METADATA":
        return path.parent.name.endswith(".dist-info")
    return str(path) in {"/etc/os-release", "/usr/lib/os-release", "/var/lib/dpkg/status"}


def _debian(status: str) -> list[dict[str, str]]:
    """Return the installed packages of dpkg's status file."""
    found = []
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found.append(fields)
    return found


def bom(found: Contents) -> Bom:
    """Return the bill of materials of an image."""
    made = Bom()
    image, _, tag = found.name.rpartition(":")
    made.metadata.component = Component(
        type=ComponentType.CONTAINER,
        name=image,
        version=tag,
        properties=[Property(name=BASE, value=found.base)] if found.base else [],
    )
    named = policy().named
    factory = LicenseFactory()
    for path, package in found.python.items():
        name = canonical(package["Name"])
        licence = expression(name, package, named)
        made.components.add(
            Component(
                type=ComponentType.LIBRARY,
                name=name,
                version=package["Version"],
                purl=PackageURL("pypi", name=name, version=package["Version"]),
                bom_ref=path,
                licenses=[factory.make_from_string(licence)] if licence else [],
                properties=[Property(name="path", value=str(PurePosixPath(path).parent))],
            )
        )
    for word in found.settings.get("Env") or ():
        variable, _, version = word.partition("=")
        if variable == "PYTHON_VERSION":  # of the Python base images, which build it themselves
            purl = PackageURL("generic", name="cpython", version=version)
            made.components.add(
                Component(
                    type=ComponentType.PLATFORM,
                    name="cpython",
                    version=version,
                    purl=purl,
                    bom_ref=str(purl),
                )
            )
    for fields in found.debian:
        qualifiers = {"arch": fields["Architecture"], "distro": found.system}
        purl = PackageURL("deb", "debian", fields["Package"], fields["Version"], qualifiers)
        made.components.add(
            Component(
                type=ComponentType.LIBRARY,
                name=fields["Package"],
                version=fields["Version"],
                purl=purl,
                bom_ref=str(purl),
            )
        )
    made.register_dependency(made.metadata.component, made.components)
    return made


def text_of(found: Contents) -> str:
    """Return the bill of materials of an image as JSON."""
    return JsonV1Dot6(bom(found)).output_as_string(indent=1) + "\n"


def faults(image: str, found: Contents) -> list[str]:
    """Return the differences of an image from a release."""
    wanted = {name: pin.version for name, pin in read(LOCKS / f"{image}.txt").items()}
    own = {name: version for name, version in found.own().items() if name != "elasticjob"}
    lines = [
        f"{found.name}: {name} {own.get(name, 'is missing')}, locked: {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | own.keys())
        if wanted.get(name) != own.get(name)
    ]
    if not _DIGEST.search(found.base):
        lines.append(
            f"{found.name}: the base image {found.base or 'without a name'} is not named by its "
            "digest: run `make images BASE_IMAGE=python:3.11-slim-bookworm@sha256:…`"
        )
    return lines


def main() -> int:
    """Write the bills of materials."""
    parser = argparse.ArgumentParser(prog="python -m scripts.sbom", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the files to write")
    parser.add_argument("--release", action="store_true", help="fail unless fit for a release")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for image in IMAGES:
        archive = ARCHIVES / f"{image}.tar"
        if not archive.exists():
            print(f"{archive} does not exist: run `make images`", file=sys.stderr)
            return 1
        found = contents(archive)
        file = options.folder / f"{image}.cdx.json"
        file.write_text(text_of(found))
        print(f"{file}: {len(found.python)} Python and {len(found.debian)} Debian packages")
        lines += faults(image, found) if options.release else []
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
