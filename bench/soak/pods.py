"""Job of the soak test on a cluster: examples/digits in real pods, and their faults.

The cluster is the tests' (`make cluster`, or one given by CLUSTER=existing on which faults are
acceptable). ElasticJob is reinstalled from this checkout and stays installed.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from bench.soak.disturbances import ON_A_CLUSTER, Disturbance, JobState, Kind, job_state
from bench.soak.run import NAME, SCRIPT, Soaked, spec_of, training
from tests.cluster import images, lifecycle
from tests.cluster.borrowing import borrowed, named
from tests.e2e.api import Json, Refused
from tests.e2e.console import CommandFailed, opened, until
from tests.e2e.dump import dump
from tests.e2e.installation import ETCD_POD, SYSTEM, Installation, is_ready
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import job
from tests.e2e.nodes import Nodes

NAMESPACE = "elasticjob-soak"
STEP_SECONDS = 0.2
AGENT = "elasticjob-agent"
MOST_AGENT_RESTARTS = 1
"""Maximum restarts of a pod's agent: the kubelet delays them by 10, 20, 40 … s, and the launcher
waits 30 s for its agent."""
EVICTION_SECONDS = 30.0
END_SECONDS = 180.0
GONE_SECONDS = 150.0
"""Timeout for the cleanup, which needs several of the operator's sweeps."""
LAST = Path("/tmp/last-step")
_MOUNT = "/soak"
_KILL_WORKER = """
for child in $(cat /proc/1/task/1/children); do
    grep -qz ^LOCAL_RANK= /proc/$child/environ && kill -9 $child && killed=yes
done
test "$killed"
"""
"""Script that kills the launcher's workers, but not its standby interpreter."""
_OWN = "pods,services,secrets,poddisruptionbudgets"
_LINE = re.compile(r"^(?:\[\d+\] )?step (\d+) .* accuracy (\S+) ", re.MULTILINE)


class SoakedPods(Soaked):
    """Job in its own namespace of a cluster."""

    weights = ON_A_CLUSTER
    evicts = True
    patience_seconds = 180.0
    poll_seconds = 0.5

    def __init__(self, faults: int) -> None:
        super().__init__()
        self._faults = faults
        self._step = 0
        self._killed = ""  # uid of the killed etcd pod, or restart count of the killed agent
        self._operator = ""  # uid of the killed operator pod
        self._running: tuple[str, ...] = ()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._enter()
            self._stack = self._stack.pop_all()
        return self

    def _enter(self) -> None:
        cluster = named(os.environ) or self._stack.enter_context(borrowed())
        if cluster.engine is not None:
            images.build(lifecycle.builder_engine(cluster))
            images.load(cluster)
        self._console = self._stack.enter_context(opened(cluster, cluster.environment()))
        self._cluster, self._nodes = cluster, Nodes(cluster, self._console)
        self._installation = Installation(self._console)
        self._corner = JobNamespace(self._console, NAMESPACE)
        self._install()
        remove = ("delete", "namespace", NAMESPACE, "--ignore-not-found")
        self._console.kubectl(*remove, seconds=120)
        self._console.kubectl("create", "namespace", NAMESPACE)
        self._stack.callback(self._console.kubectl, *remove, "--wait=false")
        self._corner.apply(*self._manifests())
        self._uid = self._corner.job(NAME)["metadata"]["uid"]

    def _manifests(self) -> tuple[Json, Json]:
        """Return the script's ConfigMap, and the job that runs it beside the image's train.py."""
        script: Json = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME},
            "data": {SCRIPT.name: SCRIPT.read_text()},
        }
        work = training(LAST, "--step-seconds", STEP_SECONDS)
        work["command"][-1] = f"{_MOUNT}/{SCRIPT.name}"
        mounts = [{"name": "script", "mountPath": _MOUNT}]
        volumes = [{"name": "script", "configMap": {"name": NAME}}]
        document = job(NAME, work, trainer={"volumeMounts": mounts}, pod={"volumes": volumes})
        document["spec"] |= spec_of(self._faults)
        return script, document

    def _install(self) -> None:
        if self._installation.installed:
            self._installation.uninstall()
        self._installation.install()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # -- state

    def job_state(self) -> JobState:
        status = self._corner.status(NAME)
        found = job_state(status, status.get("rounds") or [])
        self._running = found.running
        return found

    def step(self) -> int:
        # Only rank 0 reports steps, and its former pod may be gone.
        if self._running and (lines := self._lines(self._running[0])):
            self._step = max(self._step, int(lines[-1][0]))
        return self._step

    def _lines(self, pod: str) -> list[tuple[str, str]]:
        """Return the steps and accuracies in the end of a trainer's log."""
        try:
            options = {"container": "trainer", "tailLines": "5"}
            text = self._console.api.log(NAMESPACE, pod, options, 10)
        except Refused:
            return []
        return _LINE.findall(text)

    def ended(self) -> bool:
        return self._corner.status(NAME).get("phase") in ("Succeeded", "Failed")

    def log(self) -> str:
        return "\n".join(self._corner.status(NAME).get("explanation") or ())

    def keep(self, folder: Path) -> None:
        dump(folder, self._console, [NAMESPACE])

    # -- faults

    def may(self, fault: Disturbance) -> bool:
        return fault.kind is not Kind.KILL_AGENT or self._restarts(fault.pod) <= MOST_AGENT_RESTARTS

    def apply(self, fault: Disturbance) -> None:
        if fault.unseen:
            self._kill_operator()
        match fault.kind:
            case Kind.KILL_WORKER:
                self._corner.exec(fault.pod, "trainer", _KILL_WORKER)
            case Kind.KILL_AGENT:
                self._killed = str(self._restarts(fault.pod))
                self._nodes.kill_container(self._pod(fault.pod), AGENT)
            case Kind.KILL_NODE:
                self._kill_pod(fault.pod)
            case Kind.DRAIN:
                self._evict(fault.pod)
            case Kind.DELETE_POD:
                self._corner.kubectl("delete", "pod", fault.pod, "--wait=false")
            case Kind.STOP_LAUNCHER:
                self._corner.exec(fault.pod, "trainer", "kill -TERM 1")
            case Kind.SCALE:
                self._corner.kubectl("scale", f"ej/{NAME}", f"--replicas={fault.nodes}")
            case Kind.KILL_ETCD:
                etcd = self._etcd()
                self._killed = etcd["metadata"]["uid"]
                self._kill_of_system(etcd, "etcd")
            case Kind.KILL_OPERATOR:
                self._kill_operator()

    def back(self, fault: Disturbance) -> bool:
        match fault.kind:
            case Kind.KILL_AGENT:
                restarted = self._restarts(fault.pod) > int(self._killed)
                return restarted and is_ready(self._pod(fault.pod))
            case Kind.KILL_ETCD:
                etcd = self._etcd()
                return is_ready(etcd) and etcd["metadata"]["uid"] != self._killed
        return (
            self._another_operator() if fault.unseen or fault.kind is Kind.KILL_OPERATOR else True
        )

    def _kill_operator(self) -> None:
        (operator,) = self._installation.operators()
        self._operator = operator["metadata"]["uid"]
        self._kill_of_system(operator, "operator")

    def _another_operator(self) -> bool:
        """Return True if another operator pod leads after the kill."""
        found = self._installation.operators()
        new = [pod for pod in found if pod["metadata"]["uid"] != self._operator]
        leader = self._installation.leader()
        return any(is_ready(pod) and pod["metadata"]["name"] in leader for pod in new)

    def _kill_pod(self, name: str) -> None:
        """Kill every process of a pod at the same time, without notice."""
        pod = self._pod(name)
        labels = pod["metadata"]["labels"]
        selector = ",".join(f"elasticjob.dev/{key}={labels[f'elasticjob.dev/{key}']}"
                            for key in ("job-name", "index"))  # fmt: skip
        self._cluster.kill_node_processes(pod["spec"]["nodeName"], NAMESPACE, selector)

    def _evict(self, name: str) -> None:
        """Request the eviction of one pod, as `kubectl drain` does."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": NAMESPACE},
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"

        def evicted() -> bool:
            try:
                self._console.kubectl("create", "--raw", path, "-f", "-", given=given)
            except CommandFailed:
                return False
            return True

        given = json.dumps(eviction)
        # The job's disruption budget may not count the last victim's replacement yet.
        until(evicted, f"the eviction of {name} to be granted", EVICTION_SECONDS)

    def _kill_of_system(self, pod: Json, container: str) -> None:
        """Kill a container and delete its pod: otherwise the kubelet delays a second restart."""
        with suppress(CommandFailed):  # it may still be restarting after the last kill
            self._nodes.kill_container(pod, container)
        self._console.kubectl(
            "-n", SYSTEM, "delete", "pod", pod["metadata"]["name"], "--wait=false"
        )

    def _pod(self, name: str) -> Json:
        return self._corner.find("pods", name) or {}

    def _etcd(self) -> Json:
        empty: Json = {"metadata": {"uid": self._killed}}
        return self._console.api.find("pods", ETCD_POD, SYSTEM) or empty

    def _restarts(self, name: str) -> int:
        found = (self._pod(name).get("status") or {}).get("initContainerStatuses") or ()
        return sum(int(each["restartCount"]) for each in found if each["name"] == AGENT)

    # -- end of the job

    def let_end(self, step: int) -> None:
        for pod in self._running:
            self._corner.exec(pod, "trainer", f"echo {step} > {LAST}")

    def ends(self) -> float:
        until(self.ended, f"the end of {NAME}", END_SECONDS)
        status = self._corner.status(NAME)
        if status["phase"] != "Succeeded":
            raise AssertionError(f"the job ended {status['phase']}: {self.log()}")
        return float(self._lines(status["rendezvous"]["master"])[-1][1])

    def left(self) -> list[str]:
        self._corner.delete(NAME)
        deadline = time.monotonic() + GONE_SECONDS
        while (found := self._there()) and time.monotonic() < deadline:
            time.sleep(self.poll_seconds)
        return found

    def _there(self) -> list[str]:
        """Return the job's remaining objects, keys, users and roles."""
        objects = self._corner.items(_OWN, "-l", f"elasticjob.dev/job-uid={self._uid}")
        names = [f"{each['kind']} {each['metadata']['name']}" for each in objects]
        accounts = f"{self._installation.etcdctl('user', 'list')}\n"
        accounts += self._installation.etcdctl("role", "list")
        kept = [line for line in accounts.split() if self._uid in line]
        return [*names, *self._installation.keys_of(self._uid), *kept]
