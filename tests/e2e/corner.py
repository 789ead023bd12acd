"""One namespace of the cluster, and what a user of ElasticJob does and sees in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from subprocess import TimeoutExpired
from typing import Any

from tests.e2e.console import CommandFailed, Console, Json, until

START_SECONDS = 120.0
"""Pods are scheduled, started and have imported torch, on a machine with little to spare."""
LOG_SECONDS = 5.0

_STEP = re.compile(r"^(\S+) (?:\[\d+\] )?step (\d+) (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A line that a trainer printed about one step; `at` is UTC seconds."""

    at: float
    number: int
    pod: str
    rest: str

    @property
    def pid(self) -> str:
        return self.rest.partition("pid ")[2].split()[0]


@dataclass(frozen=True, slots=True)
class Corner:
    """A namespace of a test's own."""

    console: Console
    namespace: str

    def kubectl(self, *arguments: object, given: str = "", seconds: float = 60.0) -> str:
        return self.console.kubectl("-n", self.namespace, *arguments, given=given, seconds=seconds)

    def plugin(self, *arguments: object) -> str:
        """What `kubectl elasticjob` prints here."""
        return self.console.plugin(*arguments, "-n", self.namespace)

    def apply(self, *documents: Json) -> None:
        bundle = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("apply", "-f", "-", given=json.dumps(bundle))

    def patch(self, name: str, spec: Json) -> None:
        """Change fields of a job's spec."""
        self.kubectl("patch", "ej", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def delete(self, name: str, *options: str) -> None:
        self.kubectl("delete", "ej", name, *options, seconds=90)

    # -- what there is

    def find(self, *arguments: object) -> Json | None:
        return self.console.find("-n", self.namespace, *arguments)

    def items(self, *arguments: object) -> list[Json]:
        return self.console.items("-n", self.namespace, *arguments)

    def job(self, name: str) -> Json:
        """The object; empty when there is none."""
        return self.find("ej", name) or {}

    def status(self, name: str) -> Json:
        found: Json = self.job(name).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> Json:
        """A condition of the job, empty when it is not there."""
        found = self.status(name).get("conditions") or ()
        return next((each for each in found if each["type"] == kind), {})

    def pods(self, name: str) -> dict[str, Json]:
        """Every pod of the job, by name."""
        found = self.items("pods", "-l", f"elasticjob.dev/job-name={name}")
        return {pod["metadata"]["name"]: pod for pod in found}

    def active(self, name: str) -> dict[str, Json]:
        """The pods of the job that have not ended and were not told to."""
        return {
            pod_name: pod
            for pod_name, pod in self.pods(name).items()
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") in ("Pending", "Running")
        }

    def events(self, name: str) -> list[tuple[str, str]]:
        """Reason and message of each event of the job, in the order in which they came."""
        found = self.items("events", "--field-selector", f"involvedObject.name={name}")
        found.sort(key=lambda event: str(event.get("eventTime") or event.get("firstTimestamp")))
        return [(event["reason"], event.get("message", "")) for event in found]

    def reasons(self, name: str) -> list[str]:
        return [reason for reason, _ in self.events(name)]

    def exec(self, pod: str, container: str, script: str) -> str:
        """What a shell script prints in a container."""
        return self.kubectl("exec", pod, "-c", container, "--", "sh", "-c", script)

    def kill_worker(self, pod: str) -> None:
        """kill -9 for the workers of a pod: the children of its first process, the launcher."""
        self.exec(pod, "trainer", "kill -9 $(cat /proc/1/task/1/children)")

    def finish(self, name: str) -> None:
        """Tell the counting trainers of a job that it is enough."""
        for pod in self.active(name):
            self.exec(pod, "trainer", "touch /tmp/finish")

    # -- what trainers print

    def log(self, pod: str, container: str = "trainer", *options: str) -> str:
        return self.kubectl("logs", pod, "-c", container, *options)

    def started(self, name: str) -> list[str]:
        """The pods of a job whose trainer has a log."""
        return [pod for pod, raw in self.pods(name).items() if _trainer_started(raw)]

    def steps(self, name: str, tail: int = 400) -> list[Step]:
        """The last steps of a job that its pods' logs tell of, in order of time.

        The log of a pod on a machine that does not answer is passed over.
        """
        pods = self.started(name)
        with ThreadPoolExecutor(max(1, len(pods))) as pool:
            found = pool.map(lambda pod: self._steps_of(pod, tail), pods)
            return sorted(step for steps in found for step in steps)

    def _steps_of(self, pod: str, tail: int) -> list[Step]:
        words = ("logs", pod, "-c", "trainer", "--timestamps", f"--tail={tail}")
        try:
            text = self.kubectl(*words, seconds=LOG_SECONDS)
        except (CommandFailed, TimeoutExpired):
            return []
        return [
            Step(seconds(at), int(number), pod, rest) for at, number, rest in _STEP.findall(text)
        ]

    def latest(self, name: str) -> int:
        """The step that was told of last."""
        told = self.steps(name, tail=5)
        return told[-1].number if told else 0

    # -- waiting

    def until(self, look: Callable[[], Any], what: str, within: float = 60.0) -> Any:
        return until(look, f"{what} in {self.namespace}", within)

    def running(self, name: str, nodes: int, after: int = 0, within: float = START_SECONDS) -> Json:
        """Wait until all members of a round later than `after` run on so many nodes; the status."""

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
        """Wait until the job is in one of these phases; the status then."""

        def look() -> Json | None:
            status = self.status(name)
            return status if status.get("phase") in phases else None

        found: Json = self.until(look, f"{name} to be {' or '.join(phases)}", within)
        return found

    def told(self, name: str, kind: str, status: str = "True", within: float = 60.0) -> Json:
        """Wait for a condition; it then."""

        def look() -> Json | None:
            found = self.condition(name, kind)
            return found if found.get("status") == status else None

        found: Json = self.until(look, f"{kind}={status} of {name}", within)
        return found

    def advances(self, name: str, beyond: int, within: float = 30.0) -> int:
        """Wait until a step later than that was told of; its number."""
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
    """UTC seconds of an RFC 3339 time, of which Python reads microseconds at most."""
    whole, _, fraction = moment.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
