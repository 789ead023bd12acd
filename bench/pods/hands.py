"""Fault injection into the gang of pods. Each fault returns its time in UTC seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.pods.gang import AGENT, JOB, NAMESPACE, PODS, TRAINER
from bench.pods.seen import First
from tests.cluster.cluster import Cluster
from tests.e2e.api import Api, Json


@dataclass(frozen=True, slots=True)
class Hands:
    """Fault injector that uses the cluster's nodes and its API."""

    api: Api
    cluster: Cluster

    def kill_worker(self, victim: First) -> float:
        """Send SIGKILL to one worker."""
        kill = f"date +%s.%N && kill -9 {victim.pid}"
        where = ("--namespace", NAMESPACE, victim.pod, "--container", TRAINER)
        return float(self.cluster.kubectl("exec", *where, "--", "sh", "-c", kill))

    def delete_pod(self, name: str) -> float:
        """Delete a pod, as a drain does."""
        at = time.time()
        self.api.text("DELETE", f"{PODS}/{name}")
        return at

    def kill_node(self, name: str) -> float:
        """Send SIGKILL to all processes of agent and trainer at the same moment."""
        pod = self.api.json("GET", f"{PODS}/{name}")
        kill = 'date +%s.%N && kill -9 "$@"'
        processes = self._processes(pod, (AGENT, TRAINER))
        node = pod["spec"]["nodeName"]
        return float(self.cluster.exec_on_node(node, "sh", "-c", kill, "sh", *processes))

    def scale(self, nodes: int) -> float:
        """Scale the job, as `kubectl scale` does."""
        at = time.time()
        self.api.text("PATCH", f"{JOB}/scale", {"spec": {"replicas": nodes}})
        return at

    def _processes(self, pod: Json, containers: Sequence[str]) -> list[int]:
        """Return the node's pid of the first process of each of these containers."""
        status = pod["status"]
        every = [*status["initContainerStatuses"], *status["containerStatuses"]]
        ids = {each["name"]: each["containerID"].rpartition("/")[2] for each in every}
        listed = self.cluster.exec_on_node(
            pod["spec"]["nodeName"], "ctr", "--namespace", "k8s.io", "tasks", "ls"
        )
        pids = {
            words[0]: words[1] for line in listed.splitlines() if len(words := line.split()) > 1
        }
        return [int(pids[ids[name]]) for name in containers]
