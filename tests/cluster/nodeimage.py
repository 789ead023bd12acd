"""Node image for kind, if no registry has the stock one.

Two layers: a Debian tree, and the node's parts: kind's own files, Kubernetes, the container
runtime. The images that run in a node are not in it: see `store`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from scripts.golang import output
from tests.cluster import archive, debian
from tests.cluster.archive import Image
from tests.cluster.parts import content, part
from tests.cluster.places import KUBERNETES_VERSION, PINS
from tests.cluster.programs import programs

_CNI_PLUGINS = ("host-local", "loopback", "portmap", "ptp")
_SERVICES = ("containerd.service", "kubelet.service", "undo-mount-hacks.service")


def _install(root: Path, tree: Path) -> None:
    """Fill the layer that turns a Debian tree into a node."""
    kubernetes, containerd = programs("kubernetes"), programs("containerd")
    shutil.copytree(programs("kind") / "node-files", root, dirs_exist_ok=True)
    for path in root.rglob("*"):
        executable = path.is_dir() or path.suffix == ".sh" or path.name == "entrypoint"
        path.chmod(0o755 if executable else 0o644)
    for folder, source, names in (
        ("usr/bin", kubernetes, ("kubelet", "kubeadm", "kubectl")),
        ("usr/local/bin", containerd, ("containerd", "containerd-shim-runc-v2", "ctr")),
        ("opt/cni/bin", tree / "usr/lib/cni", _CNI_PLUGINS),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(source / name, root / folder / name)
    for folder in ("kind/manifests", "etc/kubernetes/manifests", "etc/cni/net.d", "sbin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "kind/version").write_text(KUBERNETES_VERSION)
    shutil.copy(PINS / "storage.yaml", root / "kind/manifests/default-storage.yaml")
    _configure(root, containerd / "ctr")


def _configure(root: Path, ctr: Path) -> None:
    settings = root / "etc/containerd/config.toml"
    # On a machine without CAP_SYS_RESOURCE no process may lower its OOM score.
    settings.write_text(
        settings.read_text().replace(
            "restrict_oom_score_adj = false", "restrict_oom_score_adj = true"
        )
    )
    spec = json.loads(output(ctr, "oci", "spec"))
    hooks = spec.setdefault("hooks", {}).setdefault("createContainer", [])
    hooks.append({"path": "/kind/bin/mount-product-files.sh"})
    del spec["process"]["rlimits"]
    (root / "etc/containerd/cri-base.json").write_text(json.dumps(spec))
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True, exist_ok=True)
    for service in _SERVICES:
        (units / "multi-user.target.wants" / service).symlink_to(f"/etc/systemd/system/{service}")
    (units / "systemd-binfmt.service").symlink_to("/dev/null")  # would change the machine
    (root / "usr/sbin").mkdir(parents=True, exist_ok=True)
    (root / "sbin").rmdir()
    (root / "usr/sbin/init").symlink_to("/usr/lib/systemd/systemd")
    (root / "etc/systemd/journald.conf").write_text("[Journal]\nReadKMsg=no\n")
    # Of the container runtime and the kubelet, as of the control plane in `kind`.
    manager = root / "etc/systemd/system.conf.d"
    manager.mkdir()
    (manager / "collection.conf").write_text("[Manager]\nDefaultEnvironment=GOGC=400\n")


def node_image_name(folder: Path) -> str:
    """Return the image's name: each recipe has a tag of its own."""
    return f"elasticjob-test/node:{folder.stem.rpartition('-')[2]}"


def node_image() -> Path:
    """Return the folder that holds the node image, as `image.tar`."""
    tree = debian.node_tree()

    def make(into: Path) -> None:
        root = into / "root"
        root.mkdir()
        _install(root, tree)
        layers = tuple(_tar(folder, into / f"{folder.name}.tar") for folder in (tree, root))
        settings = {
            "Env": [f"PATH={archive.PATH}", "container=docker"],
            "Entrypoint": ["/usr/local/bin/entrypoint", "/sbin/init"],
            "StopSignal": "SIGRTMIN+3",  # systemd's halt signal
        }
        archive.write(into / "image.tar", [Image(node_image_name(into), layers, settings)])
        shutil.rmtree(root)
        for layer in layers:
            layer.unlink()

    made_of = [tree, *(programs(name) for name in ("kubernetes", "containerd", "kind"))]
    recipe = content(Path(__file__), Path(archive.__file__), PINS / "storage.yaml")
    return part("node", (*(folder.name for folder in made_of), recipe), make)


def _tar(folder: Path, into: Path) -> Path:
    output("tar", "--numeric-owner", "--sort=name", "-C", folder, "-cf", into, ".")
    return into
