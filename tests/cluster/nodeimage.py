"""Owns the image that kind makes its nodes of, where no registry has the stock one.

Two layers: a Debian tree, and what makes it a node: kind's own files, Kubernetes, the container
runtime, and the images of a bare cluster in the runtime's store.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getsource
from pathlib import Path
from typing import Any

from scripts.golang import output
from tests.cluster import archive, debian
from tests.cluster.archive import Image, tar_of
from tests.cluster.parts import part
from tests.cluster.places import CACHE, KUBERNETES_VERSION, PINS
from tests.cluster.programs import programs

ETCD_VERSION = "3.6.16"  # of the control plane, and of the image that the chart asks for
ETCD_IMAGE = f"gcr.io/etcd-development/etcd:v{ETCD_VERSION}"
SHELL_IMAGE = "docker.io/library/busybox:1.35"

Files = dict[str, Path | str]

_SHELL_COMMANDS = ("cat", "echo", "ls", "mkdir", "nc", "rm", "sh", "sleep", "wget")
_CNI_PLUGINS = ("host-local", "loopback", "portmap", "ptp")
_SERVICES = ("containerd.service", "kubelet.service", "undo-mount-hacks.service")
# For the time of the import: a store in that folder, and no part that runs containers.
_IMPORTER = """\
version = 3
root = "{store}"
state = "{state}"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
]
[grpc]
address = "{state}/socket"
[ttrpc]
address = "{state}/socket.ttrpc"
"""


def _with_libraries(tree: Path, *wanted: str) -> Files:
    """These programs of a Debian tree and the libraries that they load, by their place."""
    loaded = output("chroot", tree, "ldd", *wanted).split()
    names = sorted(
        {*wanted, *(word for word in loaded if word.startswith("/") and ":" not in word)}
    )
    real = output("chroot", tree, "realpath", *names).splitlines()
    return {name: tree / place.lstrip("/") for name, place in zip(names, real, strict=True)}


def _contents(tree: Path) -> Iterator[tuple[str, Files, dict[str, Any]]]:
    """What runs in a bare cluster: each image's name, its files, and how it is started."""
    kubernetes, coredns = programs("kubernetes"), programs("coredns")
    listed = (kubernetes / "kubeadm", "config", "images", "list")
    for name in output(*listed, "--kubernetes-version", KUBERNETES_VERSION).split():
        match name.rpartition(":")[0].rpartition("/")[2]:
            case "etcd":
                for etcd in (name, ETCD_IMAGE):
                    files = {f"usr/local/bin/{p}": _etcd(p) for p in ("etcd", "etcdctl")}
                    yield etcd, {**files}, {"Cmd": ["/usr/local/bin/etcd"]}
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
    yield "elasticjob-test/storage:1", {"local-path-provisioner": provisioner}, started


def _etcd(program: str) -> Path:
    return CACHE / f"etcd-{ETCD_VERSION}" / program


def _sandbox_image() -> str:
    """The pause image that kind tells its nodes' containerd to use."""
    settings = (programs("kind") / "node-files/etc/containerd/config.toml").read_text()
    return settings.partition('sandbox_image = "')[2].partition('"')[0]


def _system_images(into: Path, tree: Path) -> Path:
    """Write the archive of all that runs in a bare cluster."""
    images = [
        Image(name, (tar_of(files, into / f"{number}.tar"),), settings)
        for number, (name, files, settings) in enumerate(_contents(tree))
    ]
    archive.write(into / "images.tar", images)
    return into / "images.tar"


@contextmanager
def _containerd(store: Path, scratch: Path) -> Iterator[list[str]]:
    """A containerd that keeps images in this store; the beginning of a `ctr` command for it."""
    folder = programs("containerd")
    settings = scratch / "containerd.toml"
    settings.write_text(_IMPORTER.format(store=store, state=scratch / "state"))
    ctr = [str(folder / "ctr"), "--address", f"{scratch}/state/socket", "--namespace", "k8s.io"]
    with (scratch / "log").open("w") as log:
        server = subprocess.Popen(
            [folder / "containerd", "--config", settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + 30
            while subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"containerd: {(scratch / 'log').read_text()[-2000:]}")
                time.sleep(0.1)
            yield ctr
        finally:
            server.terminate()
            server.wait(timeout=30)


def _preload(root: Path, tree: Path) -> None:
    """Put the images of a bare cluster into the store of the node's container runtime."""
    store = root / "var" / "lib" / "containerd"
    store.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="elasticjob-") as made:  # short: sockets lie in it
        scratch = Path(made)
        images = _system_images(scratch, tree)
        with _containerd(store, scratch) as ctr:
            output(*ctr, "images", "import", "--no-unpack", "--all-platforms", images)


def _install(root: Path, tree: Path) -> None:
    """Fill the layer that makes a Debian tree a node."""
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
    # A machine may lack CAP_SYS_RESOURCE, without which no process may lower its OOM score.
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
    (units / "systemd-binfmt.service").symlink_to("/dev/null")  # it would change the machine
    (root / "usr/sbin").mkdir(parents=True, exist_ok=True)
    (root / "sbin").rmdir()
    (root / "usr/sbin/init").symlink_to("/usr/lib/systemd/systemd")
    (root / "etc/systemd/journald.conf").write_text("[Journal]\nReadKMsg=no\n")


def node_image_name(folder: Path) -> str:
    """What the image in this folder is called: a tag of its own for every recipe."""
    return f"elasticjob-test/node:{folder.stem.rpartition('-')[2]}"


def node_image() -> Path:
    """The folder that holds the node image, as `image.tar`."""
    tree = debian.node_tree()

    def make(into: Path) -> None:
        root = into / "root"
        root.mkdir()
        _install(root, tree)
        _preload(root, tree)
        layers = tuple(_tar(folder, into / f"{folder.name}.tar") for folder in (tree, root))
        settings = {
            "Env": [f"PATH={archive.PATH}", "container=docker"],
            "Entrypoint": ["/usr/local/bin/entrypoint", "/sbin/init"],
            "StopSignal": "SIGRTMIN+3",  # systemd's word for: halt
        }
        archive.write(into / "image.tar", [Image(node_image_name(into), layers, settings)])
        shutil.rmtree(root)
        for layer in layers:
            layer.unlink()

    made_of = [tree, *(programs(name) for name in ("kubernetes", "containerd", "coredns", "kind"))]
    made_of += [programs("storage"), programs("pause"), CACHE / f"etcd-{ETCD_VERSION}"]
    recipe = (Path(__file__).read_text(), getsource(archive), (PINS / "storage.yaml").read_text())
    return part("node", (*(folder.name for folder in made_of), *recipe), make)


def _tar(folder: Path, into: Path) -> Path:
    output("tar", "--numeric-owner", "--sort=name", "-C", folder, "-cf", into, ".")
    return into
