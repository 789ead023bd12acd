"""Machines of the cluster, and the operations and faults that tests apply to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.cluster.cluster import Cluster
from tests.e2e.console import Console, Json, until
from tests.e2e.installation import is_ready

JOBS = "elasticjob.dev/job-name"
READY_SECONDS = 90.0
_TASKS = ("ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Operations on the machines of one cluster."""

    cluster: Cluster
    console: Console

    @property
    def workers(self) -> list[str]:
        return sorted(self.cluster.workers)

    def wait_ready(self, node: str) -> None:
        until(lambda: self._is_ready(node), f"{node} to be ready", READY_SECONDS)

    def wait_not_ready(self, node: str) -> None:
        until(lambda: not self._is_ready(node), f"{node} to be not ready", READY_SECONDS)

    def _is_ready(self, node: str) -> bool:
        return is_ready(self.console.api.find("nodes", node) or {})

    def drain(self, node: str) -> None:
        """Drain a node, as an administrator does before a machine is taken away."""
        self.console.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force",
            "--timeout=90s", seconds=100,
        )  # fmt: skip

    def uncordon(self, node: str) -> None:
        self.console.kubectl("uncordon", node)

    @contextmanager
    def cut_off(self, node: str) -> Iterator[None]:
        """Cut the node and its pods off the network for the duration of the block."""
        self.cluster.cut_node(node)
        try:
            yield
        finally:
            self.cluster.mend_node(node)

    def kill_pods(self, node: str, namespace: str) -> None:
        """Kill a node's kubelet, then its pods of a namespace: only other nodes can notice."""
        self.cluster.exec_on_node(node, "systemctl", "kill", "--signal=KILL", "kubelet")
        assert self.cluster.kill_node_processes(node, namespace, JOBS)

    def kill_container(self, pod: Json, name: str) -> None:
        """Send SIGKILL to the first process of a container, which ends all of it."""
        status = pod["status"]
        found = [*status.get("initContainerStatuses", ()), *status["containerStatuses"]]
        (identity,) = [each["containerID"] for each in found if each["name"] == name]
        container = identity.rpartition("/")[2]
        self.cluster.exec_on_node(pod["spec"]["nodeName"], *_TASKS, container)

    def tag_image(self, node: str, image: str, tag: str) -> None:
        """Give an image another name on one node alone."""
        known, wanted = (f"docker.io/{name}" for name in (image, tag))
        self.cluster.exec_on_node(
            node, "ctr", "--namespace", "k8s.io", "images", "tag", "--force", known, wanted
        )
