"""The gang in pods: what it says of itself, and when all of it trains again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.pods.api import Api, Json, Lives, Refused
from bench.pods.seen import First, Outcome, firsts, join, recovery, together
from tests.e2e.manifests import IMAGE, job

NAMESPACE, NAME = "bench-pods", "gang"
AGENT, TRAINER = "elasticjob-agent", "trainer"
SCRIPT = Path(__file__).parent / "worker.py"
FOLDER = "/bench"
JOB = f"/apis/elasticjob.dev/v1alpha1/namespaces/{NAMESPACE}/elasticjobs/{NAME}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POLL_SECONDS = 0.2
CALM_SECONDS = 6.0
"""All train for this long before the next fault: until then standbys load what they learned."""
LIMIT_SECONDS = 120.0
COST_SECONDS = 60.0
"""Until the status says what a round cost; on an overloaded machine the operator starts anew."""
T = TypeVar("T")


class NotRecovered(Exception):
    """What was awaited did not come in time; the text says what."""


def manifests(nodes: int, warm: bool) -> list[Json]:
    """The job, of so many small pods, and its script."""
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
        recovery={"warmStart": "Auto" if warm else "Off"},
    )
    script = {"worker.py": SCRIPT.read_text()}
    configmap = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}}
    return [configmap | {"data": script}, made]


@dataclass(frozen=True, slots=True)
class Gang:
    """The running job: what it says, and when it trains again."""

    api: Api
    lives: Lives

    # -- what there is

    def status(self) -> Json:
        found: Json = self.api.json("GET", JOB).get("status") or {}
        return found

    def pods(self) -> dict[str, Json]:
        """The pods that were not told to end, and have not, by name."""
        items = self.api.json("GET", PODS)["items"]
        return {
            pod["metadata"]["name"]: pod
            for pod in items
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") in ("Pending", "Running")
            and "elasticjob.dev/job-name" in pod["metadata"].get("labels", {})
        }

    def uids(self) -> set[str]:
        """Of every pod that is there, whatever its state."""
        return {pod["metadata"]["uid"] for pod in self.api.json("GET", PODS)["items"]}

    def told(self, pods: Sequence[str]) -> list[First]:
        return [found for pod in pods for found in firsts(pod, self._log(pod, TRAINER))]

    # -- waiting

    def calm(self, nodes: int) -> dict[str, First]:
        """Wait until so many have trained for a while in one round; the workers."""

        def look() -> dict[str, First] | None:
            found = self._whole(nodes)
            newest = max((each.at for each in (found or {}).values()), default=0.0)
            return found if found and time.time() > newest + CALM_SECONDS else None

        return self._until(look, f"{nodes} nodes that train")

    def _whole(self, nodes: int) -> dict[str, First] | None:
        status, pods = self.status(), list(self.pods())
        current = status.get("rendezvous") or {}
        if (current.get("state"), current.get("nodes"), len(pods)) != ("final", nodes, nodes):
            return None
        found = together(self.told(pods), current["round"] - 1, pods)
        return None if found is None else {each.pod: each for each in found}

    def _until(self, look: Callable[[], T | None], what: str, within: float = LIMIT_SECONDS) -> T:
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(Refused):  # a moment's trouble of the API server's
                if (found := look()) is not None:
                    return found
            if time.monotonic() > deadline:
                now = " ".join(self.status().get("explanation") or ())
                raise NotRecovered(f"waited {within:g} s in vain for {what}: {now}")
            time.sleep(POLL_SECONDS)

    # -- what it cost

    def recovered(self, since: float, after: int, pods: Sequence[str]) -> Outcome:
        """Wait for the round in which exactly these pods train."""
        found, cost = self._next(after, pods)
        return recovery(found, since, cost)

    def joined(
        self, since: float | None, after: int, pods: Sequence[str], known: Collection[str]
    ) -> Outcome:
        """Wait for the round with a newcomer beside these pods, one whose uid was not known.

        It was asked for at `since`; None: what is measured begins when it was created.
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
            lambda: together(self.told(pods), after, pods), f"a round of {', '.join(pods)}"
        )

        def cost() -> Json | None:
            rounds = self.status().get("rounds") or ()
            known = (each for each in rounds if each["round"] == found[0].round)
            return next((each for each in known if "startMs" in each), None)

        return found, self._until(cost, f"the cost of round {found[0].round}", COST_SECONDS)

    # -- and what is not ours

    def plain_pod(self) -> float:
        """Seconds from asking for a pod of the same image until its process runs."""
        said = "import time; print('first', time.time(), flush=True); time.sleep(60)"
        container = {"name": "plain", "image": IMAGE, "command": ["python3", "-c", said]}
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
        """The end of its log; empty while it has none."""
        path = f"{PODS}/{pod}/log?container={container}&tailLines=60"
        try:
            return self.api.text("GET", path)
        except Refused:
            return ""
