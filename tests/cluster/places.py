"""Paths and names of the test cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "scripts" / "cluster"
WHEELS = ROOT.parent / "shared" / "wheels"  # optional: preferred wheels, e.g. a CPU-only torch

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticjob"
STATE = CACHE / "cluster"  # of the running cluster; its parts lie beside it
KUBECONFIG = STATE / "kubeconfig"
ARCHIVES = STATE / "archives"  # mounted in every node as NODE_ARCHIVES
NODE_ARCHIVES = "/archives"
STORES = STATE / "stores"  # the nodes' image stores, if no registry has the images

CLUSTER = "elasticjob"
CONTEXT = f"kind-{CLUSTER}"
CONTROL_PLANE = f"{CLUSTER}-control-plane"
NODES = (CONTROL_PLANE, f"{CLUSTER}-worker", f"{CLUSTER}-worker2")


def pinned(name: str, module: str) -> str:
    """Return the version, such as `v1.36.3`, of the module that `scripts/cluster/<name>` pins."""
    text = (PINS / name / "go.mod").read_text()
    match = re.search(rf"^(?:require )?\s*{re.escape(module)} (v\S+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"{PINS / name / 'go.mod'} must require {module}")
    return match[1]


KUBERNETES_VERSION = pinned("kubernetes", "k8s.io/kubernetes")
