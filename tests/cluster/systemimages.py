"""Images of a bare cluster: kubeadm's components, volumes, a shell, the chart's etcd.

Each is one layer of locally built programs, under the name by which Kubernetes asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.golang import output
from tests.cluster import archive
from tests.cluster.archive import Image, tar_of
from tests.cluster.places import CACHE, KUBERNETES_VERSION
from tests.cluster.programs import programs

ETCD_VERSION = "3.6.16"  # of the control plane and the chart
ETCD_PROGRAMS = ("etcd", "etcdctl", "etcdutl")
ETCD_IMAGE = f"gcr.io/etcd-development/etcd:v{ETCD_VERSION}"
SHELL_IMAGE = "docker.io/library/busybox:1.35"
STORAGE_IMAGE = "elasticjob-test/storage:1"

Files = dict[str, Path | str]

_SHELL_COMMANDS = ("cat", "echo", "ls", "mkdir", "nc", "rm", "sh", "sleep", "wget")


def _with_libraries(tree: Path, *wanted: str) -> Files:
    """Return these programs of a Debian tree and the libraries that they load, by their place."""
    loaded = output("chroot", tree, "ldd", *wanted).split()
    libraries = {word for word in loaded if word.startswith("/") and not word.endswith(":")}
    names = sorted({*wanted, *libraries})
    real = output("chroot", tree, "realpath", *names).splitlines()
    return {name: tree / place.lstrip("/") for name, place in zip(names, real, strict=True)}


def _contents(tree: Path) -> Iterator[tuple[str, Files, dict[str, Any]]]:
    """Yield each image of a bare cluster: its name, its files and its start settings."""
    kubernetes, coredns = programs("kubernetes"), programs("coredns")
    listed = (kubernetes / "kubeadm", "config", "images", "list")
    for name in output(*listed, "--kubernetes-version", KUBERNETES_VERSION).split():
        match name.rpartition(":")[0].rpartition("/")[2]:
            case "etcd":
                for image in (name, ETCD_IMAGE):
                    files = {f"usr/local/bin/{p}": etcd() / p for p in ETCD_PROGRAMS}
                    yield image, {**files}, {"Cmd": ["/usr/local/bin/etcd"]}
            case "coredns":
                yield name, {"coredns": coredns / "coredns"}, {"Entrypoint": ["/coredns"]}
            case "pause":
                for pause in (name, _sandbox_image()):
                    files = {"pause": programs("pause") / "pause"}
                    yield pause, {**files}, {"Entrypoint": ["/pause"]}
            case "kube-proxy":
                found = _with_libraries(tree, "/usr/sbin/nft")
                yield name, {**found, "usr/local/bin/kube-proxy": kubernetes / "kube-proxy"}, {}
            case program:
                yield name, {f"usr/local/bin/{program}": kubernetes / program}, {}
    shell: Files = {f"bin/{command}": "busybox" for command in _SHELL_COMMANDS}
    shell["bin/busybox"] = tree / "bin" / "busybox"
    yield SHELL_IMAGE, shell, {"Cmd": ["sh"]}
    provisioner = programs("storage") / "local-path-provisioner"
    started = {"Entrypoint": ["/local-path-provisioner"]}
    yield STORAGE_IMAGE, {"local-path-provisioner": provisioner}, started


def etcd() -> Path:
    """Return the folder with etcd's programs, made by `make etcd`."""
    return CACHE / f"etcd-{ETCD_VERSION}"


def _sandbox_image() -> str:
    """Return the pause image named in kind's containerd settings."""
    settings = (programs("kind") / "node-files/etc/containerd/config.toml").read_text()
    return settings.partition('sandbox_image = "')[2].partition('"')[0]


def write(into: Path, tree: Path) -> Path:
    """Write the archive of all images of a bare cluster."""
    images = [
        Image(name, (tar_of(files, into / f"{number}.tar"),), settings)
        for number, (name, files, settings) in enumerate(_contents(tree))
    ]
    archive.write(into / "images.tar", images)
    return into / "images.tar"
