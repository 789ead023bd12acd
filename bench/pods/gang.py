"""Gang of pods: reads its status and logs, and waits until all of it trains again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.pods.api import Lives
from bench.pods.seen import First, Outcome, firsts, join, recovery, together
from tests.e2e.api import Api, Json, Refused
from tests.e2e.manifests import IMAGE, job

NAMESPACE, NAME = "bench-pods", "gang"
AGENT, TRAINER = "elasticjob-agent", "trainer"
SCRIPT = Path(__file__).parent / "worker.py"
FOLDER = "/bench"
JOB = f"/apis/elasticjob.dev/v1alpha1/namespaces/{NAMESPACE}/elasticjobs/{NAME}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POLL_SECONDS = 0.2
STABLE_SECONDS = 6.0
"""Training time before the next fault, in which standbys load recorded modules."""
LIMIT_SECONDS = 120.0
COST_SECONDS = 60.0
"""Timeout for a round's cost in the status; on an overloaded machine the operator restarts."""
T = TypeVar("T")


class NotRecovered(Exception):
    """Wait that timed out; the text names the awaited state."""


def manifests(nodes: int, warm: bool) -> list[Json]:
    """Return the manifests of a job of `nodes` small pods and of its script."""
    made = job(
        NAME,
        {"command": ["python3", f"{FOLDER}/worker.py"]},
        nodes=nodes,
        trainer={"volumeMounts": [{"name": "script", "mountPath": FOLDER}]},
        pod={
            "terminationGracePeriodSeconds": 30,
            "volumes": [{"name": "script", "configMap": {"name": NAME}}],
        },
        maxRestarts=1000,
        recovery={"warmStart": "Auto" if warm else "Never"},
    )
    script = {"worker.py": SCRIPT.read_text()}
    configmap = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}}
    return [configmap | {"data": script}, made]


@dataclass(frozen=True, slots=True)
class Gang:
    """Running job, with its status, pods and recovery."""

    api: Api
    lives: Lives

    # -- state

    def status(self) -> Json:
        found: Json = self.api.json("GET", JOB).get("status") or {}
        return found

    def pods(self) -> dict[str, Json]:
        """Return the pods that are neither ended nor being deleted, by name."""
        items = self.api.json("GET", PODS)["items"]
        return {
            pod["metadata"]["name"]: pod
            for pod in items
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") in ("Pending", "Running")
            and "elasticjob.dev/job-name" in pod["metadata"].get("labels", {})
        }

    def uids(self) -> set[str]:
        """Return the uids of all existing pods in any state."""
        return {pod["metadata"]["uid"] for pod in self.api.json("GET", PODS)["items"]}

    def first_steps(self, pods: Sequence[str]) -> list[First]:
        return [found for pod in pods for found in firsts(pod, self._log(pod, TRAINER))]

    # -- waiting

    def undisturbed(self, nodes: int) -> dict[str, First]:
        """Wait until all nodes have trained for STABLE_SECONDS in one round; return the workers."""

        def read() -> dict[str, First] | None:
            found = self._whole(nodes)
            newest = max((each.at for each in (found or {}).values()), default=0.0)
            return found if found and time.time() > newest + STABLE_SECONDS else None

        return self._until(read, f"{nodes} nodes that train")

    def _whole(self, nodes: int) -> dict[str, First] | None:
        status, pods = self.status(), list(self.pods())
        current = status.get("rendezvous") or {}
        if (current.get("state"), current.get("nodes"), len(pods)) != ("final", nodes, nodes):
            return None
        found = together(self.first_steps(pods), current["round"] - 1, pods)
        return None if found is None else {each.pod: each for each in found}

    def _until(
        self, read: Callable[[], T | None], awaited: str, within: float = LIMIT_SECONDS
    ) -> T:
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(Refused):  # a temporary failure of the API server
                if (found := read()) is not None:
                    return found
            if time.monotonic() > deadline:
                now = " ".join(self.status().get("explanation") or ())
                raise NotRecovered(f"timeout after {within:g} s waiting for {awaited}: {now}")
            time.sleep(POLL_SECONDS)

    # -- recovery

    def recovered(self, since: float, after: int, pods: Sequence[str]) -> Outcome:
        """Wait for the round in which exactly these pods train."""
        found, cost = self._next(after, pods)
        return recovery(found, since, cost)

    def joined(
        self, since: float | None, after: int, pods: Sequence[str], known: Collection[str]
    ) -> Outcome:
        """Wait for the round with these pods and a newcomer whose uid is not in `known`.

        The newcomer was requested at `since`; with None the measurement starts at its creation.
        """

        def newcomer() -> Json | None:
            every = self.pods().values()
            return next((pod for pod in every if pod["metadata"]["uid"] not in known), None)

        pod = self._until(newcomer, "a newcomer")
        name = pod["metadata"]["name"]
        found, cost = self._next(after, [*pods, name])
        life = self.lives.of(pod["metadata"]["uid"])
        return join(found, since or life.seen["created"], cost, name, life)

    def _next(self, after: int, pods: Sequence[str]) -> tuple[list[First], Json]:
        found = self._until(
            lambda: together(self.first_steps(pods), after, pods), f"a round of {', '.join(pods)}"
        )

        def cost() -> Json | None:
            rounds = self.status().get("rounds") or ()
            known = (each for each in rounds if each["round"] == found[0].round)
            return next((each for each in known if "startMs" in each), None)

        return found, self._until(cost, f"the cost of round {found[0].round}", COST_SECONDS)

    # -- baseline

    def plain_pod(self) -> float:
        """Return the seconds from creating a pod of the same image until its process runs."""
        code = "import time; print('first', time.time(), flush=True); time.sleep(60)"
        container = {"name": "plain", "image": IMAGE, "command": ["python3", "-c", code]}
        at = time.time()
        self.api.text(
            "POST",
            PODS,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "plain"},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
            },
        )
        log = self._until(lambda: self._log("plain", "plain") or None, "a plain pod")
        self.api.text("DELETE", f"{PODS}/plain")
        self._until(lambda: "plain" not in self._names() or None, "the plain pod's end")
        return float(log.split()[1]) - at

    def _names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.api.json("GET", PODS)["items"]]

    def _log(self, pod: str, container: str) -> str:
        """Return the end of a container's log; empty if it has none yet."""
        path = f"{PODS}/{pod}/log?container={container}&tailLines=60"
        try:
            return self.api.text("GET", path)
        except Refused:
            return ""
