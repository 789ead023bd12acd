"""Settings of kind and the pod network."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster import kind
from tests.cluster.engine import Engine
from tests.cluster.places import NODES

OURS = Engine(Path("docker"), "/run/state", {"DOCKER_HOST": "unix://x"}, "node:1", "198.51.100.2")
STOCK = Engine(Path("docker"), "/home/me/cluster", image="kindest/node", api_address="127.0.0.1")


def test_cluster_has_one_control_plane_and_two_workers() -> None:
    assert [node["role"] for node in kind.settings(STOCK)["nodes"]] == [
        "control-plane",
        "worker",
        "worker",
    ]


def test_stock_images_use_their_own_network_and_image_store() -> None:
    told = kind.settings(STOCK)
    assert "disableDefaultCNI" not in told["networking"]
    assert all(len(node["extraMounts"]) == 1 for node in told["nodes"])


def test_without_registry_every_node_has_its_own_image_store() -> None:
    told = kind.settings(OURS)
    assert told["networking"]["disableDefaultCNI"] is True
    stores = [node["extraMounts"][1]["hostPath"] for node in told["nodes"]]
    assert stores == [f"/run/state/stores/{node}" for node in NODES]


def test_node_grace_covers_several_status_reports() -> None:
    assert kind.GRACE_SECONDS >= 4 * kind.REPORT_SECONDS
    (kubelet,) = kind.settings(OURS)["kubeadmConfigPatches"]
    assert json.loads(kubelet)["nodeStatusUpdateFrequency"] == f"{kind.REPORT_SECONDS}s"


def test_pods_get_addresses_from_their_node_range() -> None:
    told = json.loads(kind.plugin("10.244.7.0/24"))
    ranges = told["plugins"][0]["ipam"]["ranges"]
    assert ranges == [[{"subnet": "10.244.7.0/24"}]]
