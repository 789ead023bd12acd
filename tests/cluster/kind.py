"""Node creation: kind's settings, and the pod network if kind brings none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.cluster.engine import Engine
from tests.cluster.places import (
    ARCHIVES,
    CLUSTER,
    CONTROL_PLANE,
    KUBECONFIG,
    NODE_ARCHIVES,
    NODES,
    STATE,
    STORES,
)
from tests.cluster.programs import programs

API_PORT = 16443
CONTAINERD_ROOT = "/var/lib/containerd"
# A node is declared lost after four missed reports, and its pods are evicted ten seconds later; the
# defaults (40 s and 300 s) would only make tests slower.
REPORT_SECONDS = 3
GRACE_SECONDS = 13
TOLERATION_SECONDS = 10
# Garbage collection takes up to a quarter of the processor time of programs in Go.
GARBAGE_COLLECTION = {"GOGC": "400"}
"""Environment of programs in Go that the tests start."""

_VARIABLES = [{"name": name, "value": value} for name, value in GARBAGE_COLLECTION.items()]
_FLAGS = (  # component, flag, value
    ("apiServer", "default-not-ready-toleration-seconds", TOLERATION_SECONDS),
    ("apiServer", "default-unreachable-toleration-seconds", TOLERATION_SECONDS),
    ("controllerManager", "node-monitor-grace-period", f"{GRACE_SECONDS}s"),
)


def settings(engine: Engine) -> dict[str, Any]:
    """Return kind's cluster configuration."""
    kubelet: dict[str, Any] = {
        "kind": "KubeletConfiguration",
        "nodeStatusUpdateFrequency": f"{REPORT_SECONDS}s",
        "failCgroupV1": False,
    }
    # etcd's data lives no longer than the cluster.
    flags = [
        {"op": "add", "path": f"/{component}/extraArgs/-", "value": {"name": flag, "value": f"{v}"}}
        for component, flag, v in _FLAGS
    ]
    arguments = [{"name": "unsafe-no-fsync", "value": "true"}]
    etcd = {"local": {"extraArgs": arguments, "extraEnvs": _VARIABLES}}
    patch = [
        *flags,
        *(
            {"op": "add", "path": f"/{component}/extraEnvs", "value": _VARIABLES}
            for component in ("apiServer", "controllerManager")
        ),
        {"op": "add", "path": "/etcd", "value": etcd},
    ]
    networking: dict[str, Any] = {"apiServerAddress": engine.api_address, "apiServerPort": API_PORT}
    if engine.ours:  # the image of kind's pod network is missing
        networking |= {"disableDefaultCNI": True, "kubeProxyMode": "nftables"}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": CLUSTER,
        "networking": networking,
        "kubeadmConfigPatches": [json.dumps(kubelet)],
        "kubeadmConfigPatchesJSON6902": [
            {
                "group": "kubeadm.k8s.io",
                "version": "v1beta4",
                "kind": "ClusterConfiguration",
                "patch": json.dumps(patch),
            }
        ],
        "nodes": [
            {
                "role": "control-plane" if node == CONTROL_PLANE else "worker",
                "extraMounts": _mounts(engine, node),
            }
            for node in NODES
        ],
    }


def _mounts(engine: Engine, node: str) -> list[dict[str, Any]]:
    """Return a node's host mounts: image archives, and its image store for the private engine."""
    archives = {"hostPath": f"{engine.state}/{ARCHIVES.name}", "containerPath": NODE_ARCHIVES}
    stores = {"hostPath": f"{engine.state}/{STORES.name}/{node}", "containerPath": CONTAINERD_ROOT}
    return [{**archives, "readOnly": True}, *([stores] if engine.ours else [])]


@dataclass(frozen=True, slots=True)
class Route:
    """Pod addresses of one node."""

    node: str
    pods: str  # a CIDR
    address: str  # the node's


def plugin(pods: str) -> str:
    """Return the CNI settings of the pod network on the node with these pod addresses."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": ipam},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins})


def routes(engine: Engine) -> list[Route]:
    """Return every node's share of the pod network, as assigned by Kubernetes."""
    path = (
        "{range .items[*]}{.metadata.name} {.spec.podCIDR} "
        '{.status.addresses[?(@.type=="InternalIP")].address}{"\\n"}{end}'
    )
    command = ("exec", CONTROL_PLANE, "kubectl", "--kubeconfig=/etc/kubernetes/admin.conf")
    lines = engine.run(*command, "get", "nodes", "-o", f"jsonpath={path}").splitlines()
    return [Route(*line.split()) for line in lines if len(line.split()) == 3]


def connect(engine: Engine, node: str, found: list[Route]) -> None:
    """Configure a node's pod network and its routes to the other nodes' pods."""
    lines = []
    for route in found:
        if route.node == node:
            conflist = "/etc/cni/net.d/10-pods.conflist"
            lines.append(f"printf %s '{plugin(route.pods)}' > {conflist}.new")
            lines.append(f"mv {conflist}.new {conflist}")
        else:
            lines.append(f"ip route replace {route.pods} via {route.address}")
    script = "\n".join(lines).encode()
    engine.run("exec", "--interactive", node, "sh", "-eu", stdin=script)


def create(engine: Engine) -> None:
    """Create the nodes and wait until they are ready."""
    networks = engine.run("network", "ls", "--format", "{{.Name}}").split()
    if engine.ours and "kind" not in networks:  # kind's own would need IPv6
        engine.run("network", "create", "kind")
    config = STATE / "kind.json"
    config.write_text(json.dumps(settings(engine), indent=1))
    engine.call(
        *(programs("kind") / "kind", "create", "cluster", "--config", config),
        *("--image", engine.image, "--kubeconfig", KUBECONFIG, "--retain"),
        timeout=300,
    )
    if engine.ours:
        found = routes(engine)
        for node in NODES:
            connect(engine, node, found)


def delete(engine: Engine) -> None:
    """Remove the nodes."""
    words = ("delete", "cluster", "--name", CLUSTER, "--kubeconfig", KUBECONFIG)
    engine.call(programs("kind") / "kind", *words, timeout=120)
