"""Owns the writing of image archives, in the forms that `docker load` and containerd read.

An image is its layers, each an uncompressed tar, and how to start it. Nothing here needs an engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OCI = "application/vnd.oci.image"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


@dataclass(frozen=True, slots=True)
class Image:
    """A named image: its layers, lowest first, and its settings in Docker's words."""

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
                "history": [{"created_by": image.name} for _ in layers],  # builders count them
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


def lighten(archive: Path, into: Path, held: Collection[str]) -> tuple[str, ...]:
    """Write the one image of a Docker archive again, for a containerd that holds some layers.

    Those, by digest, are named but left out; containerd has unpacked them and does not ask.
    Returns the digests of all layers; none, and nothing useful is written, where the archive is not
    buildah's: then its layers may be packed, and containerd would know them by another digest.
    """
    with tarfile.open(archive) as old, tarfile.open(into, "w") as new:
        (image,) = json.loads(_read(old, "manifest.json"))
        config = _read(old, image["Config"])
        digests: list[str] = json.loads(config)["rootfs"]["diff_ids"]
        names = [Path(name).name.removesuffix(".tar") for name in image["Layers"]]
        if [f"sha256:{name}" for name in names] != digests:
            return ()
        layers = []
        for digest, name in zip(digests, image["Layers"], strict=True):
            size = old.getmember(name).size
            layers.append({"mediaType": f"{_OCI}.layer.v1.tar", "digest": digest, "size": size})
            if digest not in held:
                blob = tarfile.TarInfo(_blob(digest))
                blob.size = size
                new.addfile(blob, old.extractfile(name))
        described = {"mediaType": f"{_OCI}.config.v1+json", **_add_blob(new, config)}
        kind = f"{_OCI}.manifest.v1+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": described, "layers": layers}
        found = {"mediaType": kind, **_add_blob(new, json.dumps(manifest).encode())}
        found["annotations"] = {"io.containerd.image.name": image["RepoTags"][0]}
        index = {"schemaVersion": 2, "manifests": [found]}
        _add(new, "index.json", json.dumps(index).encode())
        _add(new, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    return tuple(digests)


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add_blob(tar: tarfile.TarFile, content: bytes) -> dict[str, Any]:
    """Add the content under its digest; how a description refers to it."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _add(tar, _blob(digest), content)
    return {"digest": digest, "size": len(content)}


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.extractfile(name)
    if member is None:
        raise ValueError(f"{tar.name!r} must hold {name} as a file")
    return member.read()
