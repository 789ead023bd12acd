"""Etcd with the v2 API in the cluster, deployed as a user of that API would do it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cluster import archive
from tests.cluster.archive import Image, tar_of
from tests.cluster.cluster import Cluster
from tests.cluster.places import ARCHIVES, CACHE, CONTROL_PLANE, NODE_ARCHIVES
from tests.e2e.console import Json
from tests.e2e.installation import is_ready
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import CONTROL, TOLERATION

VERSION = "3.5.35"
"""Last release line with the v2 API."""
IMAGE = f"gcr.io/etcd-development/etcd:v{VERSION}"
NAMESPACE = "e2e-backends"
ENDPOINT = f"http://etcd-v2.{NAMESPACE}.svc:2379"
"""Endpoint of the v2 etcd, permitted in values.yaml."""

_ARCHIVE = "etcd-v2.tar"
_LABELS = {"app": "etcd-v2"}


def start(cluster: Cluster, ns: JobNamespace) -> str:
    """Start etcd and wait until it is Ready; return its endpoint."""
    if cluster.engine is not None and cluster.engine.ours:
        _give_to_control_plane(cluster)  # no registry has it there
    ns.apply(_service(), _pod())
    ns.until(lambda: is_ready(ns.find("pods", "etcd-v2") or {}), "etcd-v2 to be ready", 120)
    return ENDPOINT


def _give_to_control_plane(cluster: Cluster) -> None:
    """Load the image, made of the programs that `make etcd` built, into the control-plane node."""
    programs = CACHE / f"etcd-{VERSION}"
    files: dict[str, Path | str] = {
        f"usr/local/bin/{name}": programs / name for name in ("etcd", "etcdctl")
    }
    with tempfile.TemporaryDirectory() as scratch:
        layer = tar_of(files, Path(scratch, "layer.tar"))
        image = Image(IMAGE, (layer,), {"Cmd": ["/usr/local/bin/etcd"]})
        archive.write(ARCHIVES / _ARCHIVE, [image])
    script = f"ctr --namespace k8s.io images import {NODE_ARCHIVES}/{_ARCHIVE}"
    cluster.exec_on_node(CONTROL_PLANE, "sh", "-c", script, timeout=120)
    (ARCHIVES / _ARCHIVE).unlink()


def _service() -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "etcd-v2"},
        "spec": {"selector": _LABELS, "ports": [{"port": 2379}]},
    }


def _pod() -> Json:
    """Return the pod, placed on the control plane, which no test removes."""
    container = {
        "name": "etcd",
        "image": IMAGE,
        "command": [
            "etcd",
            "--enable-v2=true",
            "--data-dir=/data",
            "--listen-client-urls=http://0.0.0.0:2379",
            f"--advertise-client-urls={ENDPOINT}",
        ],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 2379}, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "etcd-v2", "labels": _LABELS},
        "spec": {
            "nodeSelector": {CONTROL: ""},
            "tolerations": [TOLERATION],
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }
