"""Namespace of a test, with a user's operations on ElasticJobs in it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.e2e.api import Json, Refused
from tests.e2e.console import Console, until
from tests.e2e.manifests import on_control_plane

START_SECONDS = 240.0
"""Timeout for scheduling and starting pods and importing torch, on a busy machine."""
LOG_SECONDS = 5.0

_STEP = re.compile(r"^(\S+) (?:\[\d+\] )?step (\d+) (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """Line that a trainer printed about one step; `at` is UTC seconds."""

    at: float
    number: int
    pod: str
    rest: str

    @property
    def pid(self) -> str:
        return self.rest.partition("pid ")[2].split()[0]


@dataclass(frozen=True, slots=True)
class JobNamespace:
    """Namespace of a test's own. If `pinned`, the pods of its jobs run on the control plane."""

    console: Console
    namespace: str
    pinned: bool = False

    def kubectl(self, *arguments: object, given: str = "", seconds: float = 60.0) -> str:
        return self.console.kubectl("-n", self.namespace, *arguments, given=given, seconds=seconds)

    def plugin(self, *arguments: object) -> str:
        """Run `kubectl elasticjob` in this namespace and return its output."""
        return self.console.plugin(*arguments, "-n", self.namespace)

    def apply(self, *documents: Json) -> None:
        items = [on_control_plane(each) if self.pinned else each for each in documents]
        bundle = {"apiVersion": "v1", "kind": "List", "items": items}
        self.kubectl("apply", "-f", "-", given=json.dumps(bundle))

    def patch(self, name: str, spec: Json) -> None:
        """Change fields of a job's spec."""
        self.kubectl("patch", "ej", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self, name: str, *options: str) -> None:
        self.kubectl("delete", "ej", name, *options, seconds=90)

    # -- objects -----

    def find(self, resource: str, name: str) -> Json | None:
        """Return an object of a resource (`pods`), None if there is none."""
        return self.console.api.find(resource, name, self.namespace)

    def items(self, resource: str, labels: str = "", fields: str = "") -> list[Json]:
        return self.console.api.items(resource, self.namespace, labels, fields)

    def job(self, name: str) -> Json:
        """Return the job, empty if there is none."""
        return self.find("elasticjobs", name) or {}

    def status(self, name: str) -> Json:
        found: Json = self.job(name).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> Json:
        """Return a condition of the job, empty if it is absent."""
        found = self.status(name).get("conditions") or ()
        return next((each for each in found if each["type"] == kind), {})

    def pods(self, name: str) -> dict[str, Json]:
        """Return every pod of the job, by name."""
        found = self.items("pods", labels=f"elasticjob.dev/job-name={name}")
        return {pod["metadata"]["name"]: pod for pod in found}

    def active(self, name: str) -> dict[str, Json]:
        """Return the job's pods that have not ended and are not being deleted."""
        return {
            pod_name: pod
            for pod_name, pod in self.pods(name).items()
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") in ("Pending", "Running")
        }

    def events(self, name: str) -> list[tuple[str, str]]:
        """Return reason and message of each event of the job, in order of time."""
        found = self.items("events", fields=f"involvedObject.name={name}")
        found.sort(key=lambda event: str(event.get("eventTime") or event.get("firstTimestamp")))
        return [(event["reason"], event.get("message", "")) for event in found]

    def reasons(self, name: str) -> list[str]:
        return [reason for reason, _ in self.events(name)]

    def look_again(self, pod: str) -> None:
        """Make the kubelet read a pod's Secrets now, instead of within a minute or two."""
        now = {"e2e/looked-at": str(time.monotonic_ns())}
        self.console.api.annotate("pods", pod, self.namespace, **now)

    def exec(self, pod: str, container: str, script: str) -> str:
        """Run a shell script in a container and return its output."""
        return self.kubectl("exec", pod, "-c", container, "--", "sh", "-c", script)

    def kill_worker(self, pod: str) -> None:
        """Send SIGKILL to a pod's workers: children of its first process, the launcher, that show
        the command of a worker and not that of the standby."""
        script = (
            "for pid in $(cat /proc/1/task/1/children); do "
            "grep -qa 'exec(compile' /proc/$pid/cmdline || kill -9 $pid; done"
        )
        self.exec(pod, "trainer", script)

    def finish(self, name: str) -> None:
        """Tell the counting trainers of a job to finish."""
        for pod in self.active(name):
            self.exec(pod, "trainer", "touch /tmp/finish")

    # -- output of trainers

    def log(self, pod: str, container: str = "trainer") -> str:
        return self.console.api.log(self.namespace, pod, {"container": container})

    def started(self, name: str) -> list[str]:
        """Return the pods of a job whose trainer has a log."""
        return [pod for pod, raw in self.pods(name).items() if _trainer_started(raw)]

    def steps(self, name: str, tail: int = 400) -> list[Step]:
        """Return the last steps in the logs of a job's pods, in order of time.

        The log of a pod on an unreachable machine is skipped.
        """
        pods = self.started(name)
        with ThreadPoolExecutor(max(1, len(pods))) as pool:
            found = pool.map(lambda pod: self._steps_of(pod, tail), pods)
            return sorted(step for steps in found for step in steps)

    def _steps_of(self, pod: str, tail: int) -> list[Step]:
        options = {"container": "trainer", "timestamps": "true", "tailLines": str(tail)}
        try:
            text = self.console.api.log(self.namespace, pod, options, LOG_SECONDS)
        except Refused:
            return []
        return [
            Step(seconds(at), int(number), pod, rest) for at, number, rest in _STEP.findall(text)
        ]

    def latest(self, name: str) -> int:
        """Return the last reported step."""
        told = self.steps(name, tail=5)
        return told[-1].number if told else 0

    # -- waiting

    def until(self, look: Callable[[], Any], what: str, within: float = 60.0) -> Any:
        return until(look, f"{what} in {self.namespace}", within)

    def running(self, name: str, nodes: int, after: int = 0, within: float = START_SECONDS) -> Json:
        """Wait until all members of a round after `after` run on `nodes` nodes; return status."""

        def look() -> Json | None:
            status = self.status(name)
            rendezvous = status.get("rendezvous") or {}
            number = rendezvous.get("round", 0)
            here = [
                member
                for member in status.get("members") or ()
                if member["state"] == "running" and member["round"] == number
            ]
            good = rendezvous.get("state") == "final" and number > after
            return status if good and len(here) == nodes == rendezvous["nodes"] else None

        found: Json = self.until(
            look, f"{name} to run on {nodes} nodes after round {after}", within
        )
        return found

    def in_phase(self, name: str, *phases: str, within: float = START_SECONDS) -> Json:
        """Wait until the job is in one of these phases; return its status."""

        def look() -> Json | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        found: Json = self.until(look, f"{name} to be {' or '.join(phases)}", within)
        return found

    def told(self, name: str, kind: str, status: str = "True", within: float = 60.0) -> Json:
        """Wait for a condition with this status and return it."""

        def look() -> Json | None:
            found = self.condition(name, kind)
            return found if found.get("status") == status else None

        found: Json = self.until(look, f"{kind}={status} of {name}", within)
        return found

    def advances(self, name: str, beyond: int, within: float = 90.0) -> int:
        """Wait for a step later than `beyond`; return its number."""
        found: int = self.until(
            lambda: step if (step := self.latest(name)) > beyond else 0,
            f"{name} to go beyond step {beyond}",
            within,
        )
        return found

    def without_pods(self, name: str, within: float = 60.0) -> None:
        self.until(lambda: not self.pods(name), f"all pods of {name} to be gone", within)


def _trainer_started(pod: Json) -> bool:
    found = pod["status"].get("containerStatuses") or ()
    states = [each["state"] for each in found if each["name"] == "trainer"]
    return any("running" in state or "terminated" in state for state in states)


def seconds(moment: str) -> float:
    """Return the UTC seconds of an RFC 3339 time. Python parses microseconds at most."""
    whole, _, fraction = moment.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
