"""Image archives written by the test cluster."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.archive import Image, tar_of, write


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_bytes(b"code")
    return path


def read(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as tar:
        member = tar.extractfile(name)
        assert member is not None
        return member.read()


def described(archive: Path) -> list[dict[str, Any]]:
    return json.loads(read(archive, "manifest.json"))


def test_layer_is_reproducible(tmp_path: Path, program: Path) -> None:
    first = tar_of({"bin/b": program, "bin/a": "b"}, tmp_path / "1.tar").read_bytes()
    program.touch()
    assert tar_of({"bin/a": "b", "bin/b": program}, tmp_path / "2.tar").read_bytes() == first


def test_layer_holds_executables_and_links(tmp_path: Path, program: Path) -> None:
    layer = tar_of({"/bin/sh": "busybox", "/bin/busybox": program}, tmp_path / "layer.tar")
    with tarfile.open(layer) as tar:
        link, file = tar.getmember("bin/sh"), tar.getmember("bin/busybox")
    assert link.linkname == "busybox"
    assert (file.mode, file.uid, file.size) == (0o755, 0, 4)


def test_image_is_found_by_name_with_valid_digests(tmp_path: Path, program: Path) -> None:
    layer = tar_of({"program": program}, tmp_path / "layer.tar")
    archive = tmp_path / "images.tar"
    write(archive, [Image("registry.example/a:1", (layer,), {"Entrypoint": ["/program"]})])
    (image,) = described(archive)
    assert image["RepoTags"] == ["registry.example/a:1"]
    config = read(archive, image["Config"])
    assert image["Config"] == f"{hashlib.sha256(config).hexdigest()}.json"
    (digest,) = json.loads(config)["rootfs"]["diff_ids"]
    assert digest == f"sha256:{hashlib.sha256(read(archive, image['Layers'][0])).hexdigest()}"
    assert json.loads(config)["config"]["Entrypoint"] == ["/program"]


def test_layer_of_several_images_is_written_once(tmp_path: Path, program: Path) -> None:
    layer = tar_of({"program": program}, tmp_path / "layer.tar")
    archive = tmp_path / "images.tar"
    write(archive, [Image("a:1", (layer,)), Image("b:1", (layer, layer))])
    with tarfile.open(archive) as tar:
        assert len([name for name in tar.getnames() if name.endswith(".tar")]) == 1
    assert [len(image["Layers"]) for image in described(archive)] == [1, 2]
