"""Writer of image archives, in the format that `docker load` and containerd read.

An image consists of layers, each an uncompressed tar, and its start settings. No engine needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


@dataclass(frozen=True, slots=True)
class Image:
    """Named image: its layers, lowest first, and its settings in Docker's terms."""

    name: str
    layers: tuple[Path, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


def tar_of(files: Mapping[str, Path | str], into: Path) -> Path:
    """Write a layer of these files: a path copies that file, text is a symbolic link to it.

    The same files always give the same bytes.
    """
    with tarfile.open(into, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, source in sorted(files.items()):
            entry = tarfile.TarInfo(name.lstrip("/"))
            if isinstance(source, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, source
                tar.addfile(entry)
                continue
            entry.size = source.stat().st_size
            entry.mode = 0o755
            with source.open("rb") as content:
                tar.addfile(entry, content)
    return into


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def write(archive: Path, images: Iterable[Image]) -> None:
    """Write the images into one archive."""
    manifest = []
    written: set[str] = set()
    with tarfile.open(archive, "w") as tar:
        for image in images:
            layers = [_digest(layer) for layer in image.layers]
            for digest, layer in zip(layers, image.layers, strict=True):
                if digest not in written:
                    tar.add(layer, f"{digest}.tar")
                    written.add(digest)
            config = {
                "architecture": ARCHITECTURE,
                "os": "linux",
                "config": {"Env": [f"PATH={PATH}"], **image.settings},
                "history": [
                    {"created_by": image.name} for _ in layers
                ],  # builders count the entries
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in layers]},
            }
            text = json.dumps(config, sort_keys=True).encode()
            name = f"{hashlib.sha256(text).hexdigest()}.json"
            _add(tar, name, text)
            manifest.append(
                {
                    "Config": name,
                    "RepoTags": [image.name],
                    "Layers": [f"{digest}.tar" for digest in layers],
                }
            )
        _add(tar, "manifest.json", json.dumps(manifest).encode())
