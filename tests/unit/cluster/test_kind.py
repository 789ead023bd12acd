"""Settings of kind and the pod network."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster import kind
from tests.cluster.engine import Engine
from tests.cluster.places import NODES

OURS = Engine(Path("docker"), "/run/state", {"DOCKER_HOST": "unix://x"}, "node:1", "198.51.100.2")
STOCK = Engine(Path("docker"), "/home/me/cluster", image="kindest/node", api_address="127.0.0.1")


def test_one_control_plane_and_two_workers() -> None:
    assert [node["role"] for node in kind.settings(STOCK)["nodes"]] == [
        "control-plane",
        "worker",
        "worker",
    ]


def test_the_stock_images_bring_their_own_network_and_store() -> None:
    told = kind.settings(STOCK)
    assert "disableDefaultCNI" not in told["networking"]
    assert all(len(node["extraMounts"]) == 1 for node in told["nodes"])


def test_without_a_registry_every_node_has_a_store_of_its_own() -> None:
    told = kind.settings(OURS)
    assert told["networking"]["disableDefaultCNI"] is True
    stores = [node["extraMounts"][1]["hostPath"] for node in told["nodes"]]
    assert stores == [f"/run/state/stores/{node}" for node in NODES]


def test_a_node_is_given_several_chances_before_it_is_lost() -> None:
    assert kind.GRACE_SECONDS >= 4 * kind.REPORT_SECONDS
    (kubelet,) = kind.settings(OURS)["kubeadmConfigPatches"]
    assert json.loads(kubelet)["nodeStatusUpdateFrequency"] == f"{kind.REPORT_SECONDS}s"


def test_pods_get_addresses_of_their_nodes_range() -> None:
    told = json.loads(kind.plugin("10.244.7.0/24"))
    ranges = told["plugins"][0]["ipam"]["ranges"]
    assert ranges == [[{"subnet": "10.244.7.0/24"}]]
