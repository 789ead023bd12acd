"""Cluster operations for tests: kubectl, Helm and node faults."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cluster import kind
from tests.cluster.engine import Engine, wait_until
from tests.cluster.places import CONTEXT, CONTROL_PLANE, KUBECONFIG, NODES, STATE

KUBECTL, HELM = STATE / "cli" / "kubectl", STATE / "cli" / "helm"

_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"

# Drop all traffic but the node's own loopback: as silent as a cut cable.
_CUT = """\
add table inet cut
add chain inet cut in { type filter hook prerouting priority -500; }
add chain inet cut out { type filter hook postrouting priority 500; }
add rule inet cut in iifname "eth0" drop
add rule inet cut out oifname "eth0" drop
"""


class CommandFailed(Exception):
    """Failure of a program of the cluster; the message holds its output."""


class NotOurs(CommandFailed):
    """Refusal to inject faults into the nodes of an existing cluster."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Running cluster. Fault controls work only on a cluster made here, not on an existing one."""

    kubeconfig: Path
    kubectl_program: Path
    helm_program: Path
    context: str
    nodes: tuple[str, ...]
    engine: Engine | None = None  # the container engine that runs the nodes
    control_planes: frozenset[str] = frozenset({CONTROL_PLANE})

    @property
    def workers(self) -> tuple[str, ...]:
        """Nodes that tests may inject faults into."""
        return tuple(node for node in self.nodes if node not in self.control_planes)

    def environment(self) -> dict[str, str]:
        """Return the environment in which kubectl, Helm and clients find this cluster."""
        path = f"{self.kubectl_program.parent}:{os.environ.get('PATH', '')}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def kubectl(
        self, *words: object, input: str | None = None, timeout: float = 60, check: bool = True
    ) -> str:
        """Run kubectl and return its output; raise `CommandFailed` on failure if `check` is set."""
        return self._run(self.kubectl_program, "--context", words, input, timeout, check)

    def helm(
        self, *words: object, input: str | None = None, timeout: float = 120, check: bool = True
    ) -> str:
        """Run helm and return its output; raise `CommandFailed` on failure if `check` is set."""
        return self._run(self.helm_program, "--kube-context", words, input, timeout, check)

    def json(self, *words: object, timeout: float = 60) -> Any:
        """Return kubectl's JSON output, parsed: `cluster.json("get", "pods")["items"]`."""
        return json.loads(self.kubectl(*words, "--output", "json", timeout=timeout))

    def _run(
        self,
        program: Path,
        option: str,
        words: tuple[object, ...],
        input: str | None,
        timeout: float,
        check: bool,
    ) -> str:
        done = subprocess.run(
            [str(program), option, self.context, *map(str, words)],
            env=self.environment(),
            input=input or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise CommandFailed(f"{program.name} {' '.join(map(str, words))}: {said}")
        return done.stdout

    # -- faults --------------------------------------------------------------------------------

    def _docker(self, *words: object, stdin: bytes | None = None, timeout: float = 60) -> str:
        if self.engine is None:
            raise NotOurs(f"the nodes of {self.context} are not ours to hurt")
        return self.engine.run(*words, stdin=stdin, timeout=timeout)

    def exec_on_node(self, node: str, *command: object, timeout: float = 60) -> str:
        """Run the command on the node as root and return its output."""
        return self._docker("exec", node, *command, timeout=timeout)

    def pause_node(self, node: str) -> None:
        """Freeze every process of the node, its pods included; the network stays silent."""
        self._docker("pause", node)

    def unpause_node(self, node: str) -> None:
        """Resume a paused node."""
        self._docker("unpause", node)

    def cut_node(self, node: str) -> None:
        """Cut the node and its pods off the network, silently: no packet leaves or arrives."""
        self._docker("exec", "--interactive", node, "nft", "-f", "-", stdin=_CUT.encode())

    def mend_node(self, node: str) -> None:
        """Reconnect a cut node to the network; do nothing for a node that is not cut."""
        # The table is created first, so that the delete cannot fail.
        script = b"add table inet cut\ndelete table inet cut\n"
        self._docker("exec", "--interactive", node, "nft", "-f", "-", stdin=script)

    def stop_node(self, node: str) -> None:
        """Power the node off: every process ends at once, without a farewell."""
        self._docker("kill", node)

    def start_node(self, node: str, timeout: float = 90) -> None:
        """Start a stopped node and wait until it is ready again."""
        self._docker("start", node)
        if self.engine is not None and self.engine.ours:
            found = kind.routes(self.engine)
            for other in self.nodes:
                kind.connect(self.engine, other, found)
        self.wait_for_node(node, timeout=timeout)

    def is_ready(self, node: str) -> bool:
        """Return True if the node's Ready condition is True."""
        conditions = self.json("get", "node", node)["status"]["conditions"]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def wait_for_node(self, node: str, *, ready: bool = True, timeout: float = 60) -> None:
        """Wait until the node is ready, or not ready if `ready` is False."""
        word = "ready" if ready else "not ready"
        wait_until(lambda: self.is_ready(node) is ready, timeout, f"{node} to be {word}")

    def kill_node_processes(
        self, node: str, namespace: str, selector: str = "", containers: tuple[str, ...] = ()
    ) -> int:
        """Send SIGKILL to every process of these containers on this node, all at the same time.

        SIGSTOP comes first: otherwise a process that dies later could report the death of the
        others.

        The pods are those of the namespace and label selector, the containers those named,
        otherwise all running ones. Return the number of containers killed.
        """
        words = ["get", "pods", "--namespace", namespace, "--selector", selector]
        pods = self.json(*words, "--field-selector", f"spec.nodeName={node}")["items"]
        hit = [
            status["containerID"].rpartition("/")[2]
            for pod in pods
            for field in ("initContainerStatuses", "containerStatuses")
            for status in pod["status"].get(field, [])
            if "running" in status["state"] and (not containers or status["name"] in containers)
        ]
        kill = "ctr --namespace k8s.io tasks kill --all --signal"
        script = "; ".join(
            f'for container; do {kill} {signal} "$container" & done; wait'
            for signal in ("SIGSTOP", "SIGKILL")
        )
        self.exec_on_node(node, "sh", "-c", script, "sh", *hit)
        return len(hit)


def ours(engine: Engine) -> Cluster:
    """Return the cluster that `make cluster` makes in this engine."""
    return Cluster(KUBECONFIG, KUBECTL, HELM, CONTEXT, NODES, engine)


def existing(kubeconfig: Path, kubectl: Path, helm: Path, context: str) -> Cluster:
    """Return an existing cluster by the name of its context; it must answer."""
    nameless = Cluster(kubeconfig, kubectl, helm, context, ())
    nodes = nameless.json("get", "nodes", timeout=30)["items"]
    labels = {node["metadata"]["name"]: node["metadata"].get("labels", {}) for node in nodes}
    control_planes = frozenset(name for name in labels if _CONTROL_PLANE in labels[name])
    return replace(nameless, nodes=tuple(labels), control_planes=control_planes)
