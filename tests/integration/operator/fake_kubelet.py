"""Pods with a real agent and a real launcher, as processes: configured by the operator's Pod
objects, and reported to the API server as a kubelet would.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elasticjob_agent.zipapp_build import build_zipapp
from elasticjob_operator.domain.manifests import names
from elasticjob_operator.domain.manifests.names import HEALTH_PORT
from tests.integration.etcd_server import wait_until
from tests.integration.operator.fake_agents import address
from tests.integration.operator_rig import SECONDS, Json, Namespace

_FOLDERS = {  # the longer path first
    names.ACCESS_PATH: "access",
    names.CONTROL_PATH: "control",
    names.LOGS_PATH: "logs",
    names.SHARED_PATH: "shared",
}
_DEATH = ("setpriv", "--pdeathsig", "KILL")
READY_SECONDS = 60.0


@dataclass
class RealPod:
    """Running pod. `address` is its listening address; `endpoint` replaces the DNS name."""

    ns: Namespace
    name: str
    address: str
    endpoint: str = ""
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ej-pod-")))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Start its containers; the pod has an address."""
        raw = self.ns.get("pods", self.name)
        assert raw is not None
        for part in _FOLDERS.values():
            (self.folder / part).mkdir()
        self._mount_secret(raw)
        build_zipapp(Path(self._local(names.LAUNCHER_PATH)))
        [trainer] = raw["spec"]["containers"]
        [agent] = [
            one for one in raw["spec"]["initContainers"] if one["name"] == names.AGENT_CONTAINER
        ]
        command = [self._local(word) for word in (*trainer["command"], *trainer.get("args", ()))]
        self._run("launcher", command, self._environment(trainer, raw))
        self._run("agent", ["-m", "elasticjob_agent"], self._environment(agent, raw))
        self.ns.set_pod(
            self.name, phase="Running", podIP=self.address, podIPs=[{"ip": self.address}]
        )

    def ready(self) -> None:
        """Wait until its probe succeeds, and report that to the API server."""
        wait_until(self._probe, f"{self.name} to be ready; see {self.folder}", READY_SECONDS)
        self.ns.run_pod(self.name)

    def log(self, container: str) -> str:
        return (self.folder / f"{container}.log").read_text()

    def lose(self) -> None:
        """Lose its machine: no process is notified, and later the object is removed too."""
        self.close()
        self.ns.remove_pod(self.name)

    def terminate(self) -> None:
        """End the pod as a kubelet does: first the agent's preStop, then SIGTERM to the trainer."""
        control = {"ELASTICJOB_CONTROL": self._local(names.CONTROL_SOCKET_PATH)}
        command = [sys.executable, "-m", "elasticjob_agent", "leave", "its pod is to end"]
        subprocess.run(command, env={**os.environ, **control}, timeout=SECONDS, check=True)
        trainer, agent = self.processes
        trainer.terminate()
        trainer.wait(SECONDS)
        agent.terminate()
        agent.wait(SECONDS)

    def kill_worker(self) -> None:
        children = Path(f"/proc/{self.processes[0].pid}/task/{self.processes[0].pid}/children")
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    def exit_code(self) -> int:
        """Wait for the end of trainer and agent; return the trainer's exit code."""
        trainer, agent = (process.wait(SECONDS) for process in self.processes)
        assert agent is not None
        return trainer

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        words = command[1:] if command[0] in ("python3", sys.executable) else command
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*_DEATH, sys.executable, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            )

    def _environment(self, container: Json, raw: Json) -> dict[str, str]:
        fields = {
            "metadata.uid": raw["metadata"]["uid"],
            "status.podIP": self.address,
            "spec.nodeName": "here",
        }
        told = {
            one["name"]: fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            if "valueFrom" in one
            else self._local(one.get("value", ""))
            for one in container["env"]
        }
        for one in container["env"]:
            if one["name"] == "ELASTICJOB_PREFIX":
                told["ELASTICJOB_PREFIX"] = one["value"]  # a key prefix, which looks like a path
            elif one["name"] == "ELASTICJOB_ENDPOINTS":
                told["ELASTICJOB_ENDPOINTS"] = self.endpoint
        kept = {key: value for key, value in os.environ.items() if "ELASTICJOB" not in key}
        end = self.folder / f"{container['name']}.end"
        return {**kept, **told, "ELASTICJOB_TERMINATION_LOG": str(end)}

    def _local(self, text: str) -> str:
        for path, part in _FOLDERS.items():
            if text == path or text.startswith(f"{path}/"):
                return f"{self.folder / part}{text.removeprefix(path)}"
        return text

    def _mount_secret(self, raw: Json) -> None:
        job = raw["metadata"]["labels"][names.JOB_LABEL]
        secret = self.ns.get("secrets", f"{job}-elasticjob")
        assert secret is not None
        for key, value in secret["data"].items():
            (self.folder / "access" / key).write_bytes(base64.b64decode(value))

    def _probe(self) -> bool:
        for process in self.processes:
            assert process.poll() is None, self.log("agent") + self.log("launcher")
        url = f"http://{self.address}:{HEALTH_PORT}/ready"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@dataclass
class Kubelet:
    """Runner of one c10d job's pods. Without DNS, its first pod always has the same address."""

    ns: Namespace
    store: str = field(default_factory=address)
    endpoint: str = ""
    pods: dict[str, RealPod] = field(default_factory=dict)

    def start(self, *pod_names: str) -> None:
        """Start these pods and wait until all of them are Ready."""
        for name in pod_names:
            place = self.store if name.endswith("-0") else address()
            self.pods[name] = RealPod(self.ns, name, place, self.endpoint)
            self.pods[name].start()
        for name in pod_names:
            self.pods[name].ready()

    def replace(self, name: str) -> None:
        """Lose a pod and start its successor, perhaps of another name."""
        before = self._uids()
        self.pods.pop(name).lose()
        wait_until(lambda: bool(self._uids() - before), f"the successor of {name}", SECONDS)
        [(successor, _)] = self._uids() - before
        self.start(successor)

    def follow(self, *left: str) -> None:
        """Wait until the operator has deleted all pods but these, and end those."""
        self.ns.await_pods(*left)
        for name in sorted(set(self.pods) - set(left)):
            gone = self.pods.pop(name)
            gone.terminate()
            gone.close()

    def _uids(self) -> set[tuple[str, str]]:
        """Return name and uid of each pod."""
        found = (raw["metadata"] for raw in self.ns.all("pods"))
        return {(one["name"], one["uid"]) for one in found}


@contextmanager
def kubelet(ns: Namespace, endpoint: str = "") -> Iterator[Kubelet]:
    made = Kubelet(ns)
    made.endpoint = endpoint or f"{made.store}:29400"
    try:
        yield made
    finally:
        for pod in made.pods.values():
            pod.close()
