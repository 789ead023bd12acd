"""Debian trees: one with the container engine, one for the nodes, one with Python.

Each is bootstrapped into the cache from the distribution's packages: nothing is installed on the
machine, no service is started, and the contents do not depend on the machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from inspect import getsource
from pathlib import Path

from scripts.environment import locked
from scripts.golang import SCRIPTS, output
from tests.cluster.parts import part
from tests.cluster.places import CACHE, PINS

_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "bookworm"  # as in the Dockerfiles' base images
ENGINE = (
    *("buildah", "ca-certificates", "containernetworking-plugins", "docker.io", "iproute2"),
    *("iptables", "kmod", "python3", "tini"),
)
NODE = (  # as kind's own image, without packages only other storage and snapshotters need
    *("busybox-static", "ca-certificates", "conntrack", "containernetworking-plugins", "curl"),
    *("e2fsprogs", "ethtool", "iproute2", "iptables", "jq", "kmod", "mount", "nftables"),
    *("procps", "runc", "socat", "systemd", "util-linux"),
)
PYTHON = ("ca-certificates", "python3", "python3-pip", "python3-venv")

_LITTER = ("usr/share/doc", "usr/share/man", "var/cache/apt", "var/lib/apt/lists", "var/log")

# Services that a node does not need, as in kind's own image.
_UNWANTED = (
    "lib/systemd/system/multi-user.target.wants/*",
    "lib/systemd/system/local-fs.target.wants/*",
    "lib/systemd/system/sockets.target.wants/*udev*",
    "lib/systemd/system/sockets.target.wants/*initctl*",
    "lib/systemd/system/basic.target.wants/*",
    "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
    "etc/systemd/system/*.wants/*",
    # These would change the machine's own kernel.* settings.
    "usr/lib/sysctl.d/*.conf",
    "etc/sysctl.d/99-sysctl.conf",
)


def needs(*commands: str) -> None:
    """Install the packages of these commands, for those that are missing."""
    missing = [command for command in commands if not find(command)]
    if missing:
        packages = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
        packages |= {"rsvg-convert": "librsvg2-bin"}
        output(SCRIPTS / "apt", "install", *(packages.get(name, name) for name in missing))


def find(command: str) -> str | None:
    """Return the command's path, including sbin folders that a plain user's PATH lacks."""
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


def _bootstrap(into: Path, packages: tuple[str, ...]) -> None:
    if os.geteuid() != 0:
        raise PermissionError("no Docker engine that has a registry: the rest needs root")
    needs("debootstrap")
    if not _KEYS.exists():
        output(SCRIPTS / "apt", "install", "debian-archive-keyring")
    packages_kept = CACHE / "debs"
    packages_kept.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "debs.lock"):
        output(
            *(find("debootstrap"), "--variant=minbase", f"--cache-dir={packages_kept}"),
            *(f"--keyring={_KEYS}", "--force-check-gpg"),
            *(f"--include={','.join(packages)}", SUITE, into),
        )
    for litter in _LITTER:
        shutil.rmtree(into / litter)
        (into / litter).mkdir()


def _tree(name: str, packages: tuple[str, ...], finish: Callable[[Path], None]) -> Path:
    def make(into: Path) -> None:
        _bootstrap(into, packages)
        finish(into)

    recipe = (getsource(_bootstrap), getsource(finish), *_UNWANTED)
    return part(name, (SUITE, *packages, *recipe), make)


def engine_tree() -> Path:
    """Return the tree in which the container engine and the image builder run."""

    def finish(tree: Path) -> None:
        output("chroot", tree, "dockerd", "--version")
        output("chroot", tree, "buildah", "--version")

    return _tree("engine", ENGINE, finish)


def node_tree() -> Path:
    """Return the tree of the nodes, without Kubernetes and its runtime."""

    def finish(tree: Path) -> None:
        for pattern in _UNWANTED:
            for unit in tree.glob(pattern):
                unit.unlink()
        output("chroot", tree, "runc", "--version")

    return _tree("node-tree", NODE, finish)


def python_tree() -> Path:
    """Return a substitute for the `python` image of the registry: the same Python minor version."""

    def finish(tree: Path) -> None:
        (tree / "usr" / "bin" / "python").symlink_to("python3")
        for marker in tree.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # plain `pip install` works, as in the real image
        output(
            "chroot",
            tree,
            "python",
            "-c",
            "import sys, venv; assert sys.version_info[:2] == (3, 11)",
        )
        output("chroot", tree, "pip", "--version")

    return _tree("python", PYTHON, finish)


def inside(tree: Path, seen: dict[Path, str], *command: object) -> list[str]:
    """Return the command that runs this one inside the tree, with `seen` host paths mounted."""
    return [
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
        *(str(PINS / "inside.sh"), str(tree)),
        *(f"{source}={target}" for source, target in seen.items()),
        *("--", *map(str, command)),
    ]
