"""The image of examples/digits: the trainers' image with the script on top.

What `docker build -t elasticjob/digits:dev examples/digits` makes elsewhere. Every node has the
trainers' image unpacked, so only the script's layer travels: the archive names the others.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.places import ARCHIVES, NODE_ARCHIVES

NAME = "elasticjob/digits:dev"
SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"

_TYPES = "application/vnd.oci.image"


def load(cluster: Cluster) -> None:
    """Put the image into every node. The trainers' image must be there already."""
    archive = ARCHIVES / "digits.tar"
    _write(archive, _layer())
    for node in cluster.nodes:
        words = ("ctr", "--namespace", "k8s.io", "images", "import", "--local")
        cluster.exec_on_node(node, *words, f"{NODE_ARCHIVES}/{archive.name}")


def _layer() -> bytes:
    """The script in a folder where whoever it runs as writes its checkpoints."""
    folder, script = tarfile.TarInfo("digits"), tarfile.TarInfo("digits/train.py")
    folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
    script.size, script.mode = SCRIPT.stat().st_size, 0o644
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.addfile(folder)
        tar.addfile(script, io.BytesIO(SCRIPT.read_bytes()))
    return made.getvalue()


def _write(archive: Path, layer: bytes) -> None:
    config, layers = _trainer()
    config["rootfs"]["diff_ids"].append(_digest(layer))
    config["config"]["WorkingDir"] = "/digits"
    config.pop("history", None)
    layers.append(_descriptor(layer, "layer.v1.tar"))
    made = _bytes(config)
    manifest = _bytes(
        {
            "schemaVersion": 2,
            "mediaType": f"{_TYPES}.manifest.v1+json",
            "config": _descriptor(made, "config.v1+json"),
            "layers": layers,
        }
    )
    named = {"annotations": {"io.containerd.image.name": f"docker.io/{NAME}"}}
    index = {"schemaVersion": 2, "manifests": [_descriptor(manifest, "manifest.v1+json") | named]}
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", _bytes({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _bytes(index))
        for blob in (made, manifest, layer):
            _add(tar, f"blobs/sha256/{_digest(blob).partition(':')[2]}", blob)


def _trainer() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of the trainers' image, and what its layers are called."""
    with tarfile.open(ARCHIVES / "trainer.tar") as tar:

        def read(name: str) -> Any:
            member = tar.extractfile(name)
            assert member is not None
            return json.load(member)

        (manifest,) = read("manifest.json")
        config = read(manifest["Config"])
        sizes = [tar.getmember(_real(tar, name)).size for name in manifest["Layers"]]
    layers = [
        {"mediaType": f"{_TYPES}.layer.v1.tar", "digest": digest, "size": size}
        for digest, size in zip(config["rootfs"]["diff_ids"], sizes, strict=True)
    ]
    return config, layers


def _real(tar: tarfile.TarFile, name: str) -> str:
    """Where a layer's content is: equal ones may be links to one."""
    member = tar.getmember(name)
    if not member.issym():
        return name
    return str(Path(name).parent.joinpath(member.linkname))


def _descriptor(content: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": f"{_TYPES}.{kind}", "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _bytes(document: Any) -> bytes:
    return json.dumps(document).encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
