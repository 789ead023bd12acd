"""Programs of the cluster, built from the Go modules that `scripts/cluster/` pins.

A program is accepted only after it has printed the expected version.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.golang import SETTINGS, go, output
from tests.cluster.parts import content, part
from tests.cluster.places import CACHE, KUBERNETES_VERSION, PINS, pinned

_, _MINOR, _ = KUBERNETES_VERSION.split(".")
_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True)
class Module:
    """Pinned module, with the version stamps of its programs and the commands that print them."""

    path: str  # empty: the program's source is in scripts/cluster
    asked: dict[str, tuple[str, ...]]  # version command by program; empty: it has none
    stamps: tuple[tuple[str, str], ...] = ()  # Go variables that its own build sets


MODULES = {
    "kubernetes": Module(
        "k8s.io/kubernetes",
        {
            **dict.fromkeys(
                ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler"),
                ("--version",),
            ),
            "kubeadm": ("version", "-o", "short"),
            "kubectl": ("version", "--client"),
            "kubelet": ("--version",),
        },
        # Without a version kubeadm and kubectl refuse to compare themselves with the server.
        (
            (f"{_VERSION}.gitVersion", KUBERNETES_VERSION),
            (f"{_VERSION}.gitMajor", "1"),
            (f"{_VERSION}.gitMinor", _MINOR),
            (f"{_VERSION}.gitTreeState", "clean"),
        ),
    ),
    "containerd": Module(
        "github.com/containerd/containerd/v2",
        {"containerd": ("--version",), "containerd-shim-runc-v2": ("-v",), "ctr": ("--version",)},
    ),
    "coredns": Module("github.com/coredns/coredns", {"coredns": ("-version",)}),
    "helm": Module("helm.sh/helm/v3", {"helm": ("version", "--short")}),
    "kind": Module("sigs.k8s.io/kind", {"kind": ("version",)}),
    "storage": Module("github.com/rancher/local-path-provisioner", {"local-path-provisioner": ()}),
    "pause": Module("", {"pause": ()}),
}


def _make(name: str, module: Module, into: Path) -> None:
    pins = PINS / name
    compiler = go(CACHE)
    version = pinned(name, module.path) if module.path else ""
    stamps = module.stamps
    if name == "helm":
        stamps = (("helm.sh/helm/v3/internal/version.version", version),)
    if name == "containerd":
        stamps = ((f"{module.path}/version.Version", version.removeprefix("v")),)
    ldflags = " ".join(["-s -w", *(f"-X {variable}={value}" for variable, value in stamps)])
    output(
        *(compiler, "build", "-trimpath", "-ldflags", ldflags, "-o", f"{into}/"),
        "tool" if module.path else ".",
        cwd=pins,
        **SETTINGS,
    )
    for program, words in module.asked.items():
        said = output(into / program, *words) if words else version
        if version.removeprefix("v") not in said:
            raise RuntimeError(f"{program} should be {version}, and says it is {said.strip()!r}")
    if name == "kind":  # files that kind adds to its node images
        source = output(compiler, "list", "-m", "-f", "{{.Dir}}", module.path, cwd=pins)
        shutil.copytree(Path(source.strip()) / "images" / "base" / "files", into / "node-files")


def programs(name: str) -> Path:
    """Return the folder with the programs of this pinned module, built if absent."""
    return part(
        name, (content(PINS / name), MODULES[name]), lambda into: _make(name, MODULES[name], into)
    )
