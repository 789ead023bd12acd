"""Operator as a process, on a real API server and a real etcd; the test plays the kubelet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.apiserver import ADMIN, ApiServer, Refused
from tests.integration.etcd_server import EtcdServer, Ports, wait_until
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob

Json = dict[str, Any]
SECONDS = 60.0
SIDECAR_IMAGE = "sidecar:test"
NODES = "/api/v1/nodes"
_STOP_SECONDS = 60.0


@dataclass
class Operator:
    """Operator replica. Its log is in `folder`."""

    folder: Path
    server: ApiServer
    etcd: EtcdServer
    name: str = "operator-0"
    options: dict[str, str] = field(default_factory=dict)
    user: str = ADMIN
    ports: Ports = field(default_factory=lambda: Ports(2))
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> Operator:
        self.launch()
        wait_until(self.ready, f"the operator {self.name}; see {self.log}")
        return self

    @contextmanager
    def running(self) -> Iterator[Operator]:
        """Run the operator for the duration of the block."""
        try:
            yield self.start()
        finally:
            self.close()

    def launch(self) -> None:
        kept = {key: value for key, value in os.environ.items() if "ELASTICJOB" not in key}
        environment = kept | {
            "KUBECONFIG": str(self.server.kubeconfig(self.user)),
            "ELASTICJOB_SIDECAR_IMAGE": SIDECAR_IMAGE,
            "ELASTICJOB_ETCD_ENDPOINTS": self.etcd.url,
            "ELASTICJOB_POD_NAME": self.name,
            "ELASTICJOB_HEALTH_PORT": str(self.ports.numbers[0]),
            "ELASTICJOB_METRICS_PORT": str(self.ports.numbers[1]),
            "PYTHONWARNINGS": "default",
            **self.options,
        }
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "elasticjob_operator"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the operator ended:\n{self.log.read_text()[-3000:]}")
        return self.page("/readyz")[0] == 200

    def page(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of its health port, or of its metrics."""
        port = self.ports.numbers[1 if path == "/metrics" else 0]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of one metric, 0 if it was never counted."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.page("/metrics")[1].splitlines():
            found, _, value = line.rpartition(" ")
            if found.partition("{")[0] == name and all(label in found for label in wanted):
                return float(value)
        return 0.0

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(_STOP_SECONDS)

    def stop(self) -> int:
        """End the operator as a kubelet does; return its exit code."""
        self.signal(signal.SIGTERM)
        assert self.process is not None
        return self.process.wait(_STOP_SECONDS)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.ports.close()


@contextmanager
def running_binder(
    folder: Path, server: ApiServer, arguments: Sequence[str], user: str
) -> Iterator[Path]:
    """Run the binder with these arguments for the duration of the block; yield its log."""
    ports, log = Ports(1), folder / "binder.log"
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "elasticjob_operator"]
    health = f"--health-port={ports.numbers[0]}"  # the last one given counts
    environment = os.environ | {"KUBECONFIG": str(server.kubeconfig(user))}
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, "bind", *arguments, health], stdout=said, stderr=said, env=environment
        )
    try:
        wait_until(lambda: _answers(ports.numbers[0], process, log), f"the binder; see {log}")
        yield log
    finally:
        process.terminate()
        process.wait(_STOP_SECONDS)
        ports.close()


def _answers(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"the binder ended:\n{log.read_text()[-3000:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except OSError:
        return False


def alone_in(namespace: str) -> dict[str, str]:
    """Return options of an operator that watches this namespace only."""
    return {"ELASTICJOB_NAMESPACES": namespace, "ELASTICJOB_LEASE_NAMESPACE": namespace}


ROOT_PASSWORD = "the-root-password"
"""Password of etcd's root in `administers_users`."""


def administers_users(folder: Path, namespace: str) -> dict[str, str]:
    """Write root's credentials; return options of an operator that gives each job an etcd user."""
    for name, text in (("user", "root"), ("password", ROOT_PASSWORD)):
        (folder / name).write_text(text)
    return {
        "ELASTICJOB_ETCD_USER_FILE": str(folder / "user"),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(folder / "password"),
        "ELASTICJOB_MANAGE_ETCD_USERS": "true",
        **alone_in(namespace),
    }


@dataclass
class Namespace:
    """Operations of users and the kubelet in the test's namespace."""

    server: ApiServer
    name: str

    def path(self, plural: str, name: str = "") -> str:
        roots = {
            "elasticjobs": "/apis/elasticjob.dev/v1alpha1",
            "poddisruptionbudgets": "/apis/policy/v1",
            "networkpolicies": "/apis/networking.k8s.io/v1",
            "events": "/apis/events.k8s.io/v1",
            "resourcequotas": "/api/v1",
        }
        folder = f"{roots.get(plural, '/api/v1')}/namespaces/{self.name}/{plural}"
        return f"{folder}/{name}" if name else folder

    def create_job(self, name: str = "job", **spec: Any) -> Json:
        path = ELASTICJOBS_PATH.format(self.name)
        return self.server.request("POST", path, elasticjob(name, **spec))

    def get(self, plural: str, name: str) -> Json | None:
        try:
            return self.server.request("GET", self.path(plural, name))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def present(self, plural: str, name: str) -> Json:
        """Return an object that must exist."""
        found = self.get(plural, name)
        assert found is not None, f"{plural} {name} does not exist"
        return found

    def job(self, name: str = "job") -> Json:
        return self.present("elasticjobs", name)

    def status(self, name: str = "job") -> Json:
        return self.job(name).get("status") or {}

    def condition(self, kind: str, name: str = "job") -> Json:
        conditions = self.status(name).get("conditions") or ()
        return next((found for found in conditions if found["type"] == kind), {})

    def all(self, plural: str) -> list[Json]:
        return self.server.request("GET", self.path(plural))["items"]

    def pods(self) -> list[str]:
        return sorted(raw["metadata"]["name"] for raw in self.all("pods"))

    def events(self, name: str = "job") -> list[tuple[str, str]]:
        """Return reason and message of each event of the job, oldest first."""
        found = [raw for raw in self.all("events") if raw["regarding"]["name"] == name]
        found.sort(key=lambda raw: raw["eventTime"])
        return [(raw["reason"], raw["note"]) for raw in found]

    def await_event(self, reason: str, message: str, name: str = "job") -> None:
        """Wait for an event: events are posted after the status, asynchronously."""
        wanted = (reason, message)
        try:
            wait_until(lambda: wanted in self.events(name), f"event {wanted}", SECONDS)
        except TimeoutError as error:
            raise AssertionError(f"{error}; there are {self.events(name)}") from error

    def scale(self, nodes: int, name: str = "job") -> None:
        path = self.path("elasticjobs", name) + "/scale"
        self.server.patch(path, {"spec": {"replicas": nodes}})

    def patch_job(self, body: Json, name: str = "job") -> None:
        self.server.patch(self.path("elasticjobs", name), body)

    def set_pod(self, name: str, **status: Any) -> None:
        """Write a pod's status, as the kubelet would."""
        self.server.patch(self.path("pods", name) + "/status", {"status": status})

    def create_node(self, name: str, ready: str) -> None:
        """Create a Node with this status of condition Ready."""
        condition = {"type": "Ready", "status": ready}
        self.server.request("POST", NODES, {"metadata": {"name": name}})
        self.server.patch(f"{NODES}/{name}/status", {"status": {"conditions": [condition]}})

    def delete_node(self, name: str) -> None:
        self.server.request("DELETE", f"{NODES}/{name}")

    def bind_pod(self, name: str, node: str) -> None:
        """Place a pod on a Node, as the scheduler does."""
        bound = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        self.server.request("POST", self.path("pods", name) + "/binding", bound)

    def run_pod(self, name: str) -> None:
        """Report a running trainer and agent, and the pod as Ready."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        running = {
            "name": "trainer",
            "image": "trainer:1",
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        self.set_pod(name, phase="Running", containerStatuses=[running], conditions=[ready])

    def remove_pod(self, name: str) -> None:
        """Remove the pod object, as after its grace period."""
        body = {"gracePeriodSeconds": 0}
        self.server.request("DELETE", self.path("pods", name), body)

    def await_pods(self, *names: str) -> None:
        wait_until(
            lambda: self.pods() == sorted(names), f"pods {names}, are {self.pods()}", SECONDS
        )

    def await_status(self, name: str = "job", **wanted: Any) -> None:
        """Wait for fields of the status; `pods` is the number of active pods."""

        def so() -> bool:
            status = self.status(name)
            status["pods"] = (status.get("pods") or {}).get("active")
            return all(status.get(key) == value for key, value in wanted.items())

        try:
            wait_until(so, f"status {wanted}", SECONDS)
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {self.status(name)}") from error

    def await_condition(self, kind: str, reason: str, name: str = "job") -> Json:
        try:
            wait_until(
                lambda: self.condition(kind, name).get("reason") == reason,
                f"condition {kind} with {reason}",
                SECONDS,
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {self.status(name)}") from error
        return self.condition(kind, name)
