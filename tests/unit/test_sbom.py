"""Bills of materials: every package of an image, read from its archive."""

from __future__ import annotations

import io
import json
import tarfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import sbom
from scripts.environment import LOCKS
from scripts.lock import read
from tests.cluster import archive

PACKAGES = "opt/elasticjob/lib/python3.11/site-packages"
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13
Description: library
 Version: 9

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""
DIGEST = "python:3.11-slim-bookworm@sha256:" + "1" * 64


def layer(into: Path, files: dict[str, str]) -> Path:
    with tarfile.open(into, "w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return into


def metadata(name: str) -> str:
    return distribution(name).read_text("METADATA") or ""


def image(folder: Path, *layers: dict[str, str], base: str = DIGEST) -> sbom.Contents:
    """Return the contents of an image of a Debian layer and these layers."""
    first = {
        "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": STATUS,
    }
    tars = [layer(folder / f"{number}.tar", files) for number, files in enumerate((first, *layers))]
    settings = {"Labels": {sbom.BASE: base}, "Env": ["PYTHON_VERSION=3.11.14"]}
    made = archive.Image("ghcr.io/elasticjob/sidecar:0.1.0", tuple(tars), settings)
    archive.write(folder / "image.tar", [made])
    return sbom.contents(folder / "image.tar")


def locked(image: str) -> dict[str, str]:
    """Return the files of the packages that the lock names, as they are installed here."""
    names = read(LOCKS / f"{image}.txt")
    return {f"{PACKAGES}/{name}-x.dist-info/METADATA": metadata(name) for name in names}


def components(found: sbom.Contents) -> dict[str, Any]:
    text = sbom.text_of(found)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return {one["purl"]: one for one in json.loads(text)["components"]}


def test_bill_has_every_installed_package_with_version_and_licence(tmp_path: Path) -> None:
    found = components(image(tmp_path, locked("operator")))
    python = {purl for purl in found if purl.startswith("pkg:pypi/")}
    assert python == {
        f"pkg:pypi/{name}@{distribution(name).version}" for name in read(LOCKS / "operator.txt")
    }
    assert all(found[purl]["licenses"] for purl in python)
    assert found.keys() - python == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:generic/cpython@3.11.14",
    }


def test_bill_names_the_image_and_its_base(tmp_path: Path) -> None:
    described = json.loads(sbom.text_of(image(tmp_path)))["metadata"]["component"]
    assert (described["name"], described["version"]) == ("ghcr.io/elasticjob/sidecar", "0.1.0")
    assert described["properties"] == [{"name": sbom.BASE, "value": DIGEST}]


def test_later_layers_replace_and_hide_files(tmp_path: Path) -> None:
    def info(name: str, version: str) -> str:
        return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    first = {f"{PACKAGES}/{name}.dist-info/METADATA": info(name, "1") for name in "abcd"}
    second = {
        f"{PACKAGES}/a.dist-info/METADATA": info("a", "2"),
        f"{PACKAGES}/.wh.b.dist-info": "",
        f"{PACKAGES}/c.dist-info/.wh..wh..opq": "",
        f"{PACKAGES}/d.dist-info/.wh.METADATA": "",
    }
    assert image(tmp_path, first, second).own() == {"a": "2"}


def test_image_of_the_lock_on_a_digest_is_fit_for_a_release(tmp_path: Path) -> None:
    own = {f"{PACKAGES}/elasticjob.dist-info/METADATA": metadata("elasticjob")}
    assert sbom.faults("sidecar", image(tmp_path, {**locked("sidecar"), **own})) == []


@pytest.mark.parametrize("base", ["python:3.11-slim-bookworm", "", DIGEST[:-1]])
def test_base_image_without_digest_is_not_fit_for_a_release(tmp_path: Path, base: str) -> None:
    (fault,) = sbom.faults("sidecar", image(tmp_path, locked("sidecar"), base=base))
    assert "is not named by its digest" in fault


def test_package_beside_the_lock_is_not_fit_for_a_release(tmp_path: Path) -> None:
    files = locked("sidecar")
    files[f"{PACKAGES}/rich.dist-info/METADATA"] = metadata("rich")
    files.pop(f"{PACKAGES}/protobuf-x.dist-info/METADATA")
    faults = sbom.faults("sidecar", image(tmp_path, files))
    assert [fault.split(": ", 1)[1] for fault in faults] == [
        f"protobuf is missing, locked: {distribution('protobuf').version}",
        f"rich {distribution('rich').version}, locked: nothing",
    ]
