"""Benefits for a training script beyond restarts: warm start, hang detection, checkpoints on
request, and explanations in plain words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import job
from tests.e2e.report import Report

pytestmark = pytest.mark.timeout(240, func_only=True)

NAME = "told"
SCRIPT = Path(__file__).parent / "telling.py"
FOLDER = "/telling"
HANG_SECONDS = 8
GRACE_SECONDS = 20
LEARNING_STEPS = 250
"""Steps (25 seconds) until the standby has loaded the modules imported by the first workers, which
it does 3 and 10 s after their start."""
RECOVERY_SECONDS = 5.0
"""Maximum seconds of a warm recovery, with four busy programs for each core: 0.1 to 1.7 s were
observed. The status tells whether workers started warm.
"""

_SAVED = re.compile(r"saved (\d+) in round (\d+)$", re.MULTILINE)
_BEGUN = re.compile(r"round (\d+) begins at (\d+) with (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Told:
    """Job of these tests, with its observations."""

    ns: JobNamespace
    report: Report

    @property
    def status(self) -> Json:
        return self.ns.status(NAME)

    @property
    def round(self) -> int:
        return int(self.status["rendezvous"]["round"])

    def settled(self, steps: int = 1) -> list[str]:
        """Wait until all pods train in one round for `steps` steps; return their names."""
        pods = sorted(self.ns.active(NAME))
        self.ns.running(NAME, len(pods))
        self.ns.advances(NAME, self.ns.latest(NAME) + steps)
        return pods

    def ask(self, pod: str, file: str) -> None:
        self.ns.exec(pod, "trainer", f"touch /tmp/{file}")

    def recovered(self, fault: str, act: Callable[[], object], nodes: int) -> Json:
        """Apply the fault; return the status entry of the round in which all nodes then run."""
        number = self.round
        act()
        status = self.ns.running(NAME, nodes, after=number)
        self.ns.advances(NAME, self.begun(number + 1))
        found: Json = self.ns.until(
            lambda: next((e for e in self.status["rounds"] if e.get("recoveryMs")
                          and e["round"] == status["rendezvous"]["round"]), None),
            f"what the round after {fault} cost",
        )  # fmt: skip
        assert found["round"] == number + 1, "one round, and not two"
        self.report.add("trainings", fault=fault, **found)
        return found

    def begun(self, number: int) -> int:
        """Return the step from which a round continued."""

        def look() -> int | None:
            for log in self._logs():
                for found, step, _ in _BEGUN.findall(log):
                    if int(found) == number:
                        return int(step) + 1  # never 0, which would be false
            return None

        found: int = self.ns.until(look, f"the first step of round {number}")
        return found - 1

    def saved(self, number: int) -> int:
        """Return the last step saved in a round, 0 without one."""
        told = [_SAVED.findall(log) for log in self._logs()]
        return max(
            (int(s) for each in told for s, found in each if int(found) == number), default=0
        )

    def _logs(self) -> list[str]:
        """Return the trainers' output; a pod may be about to start in the place of another."""
        started = self.ns.started(NAME)
        return [self.ns.log(pod) for pod in self.ns.active(NAME) if pod in started]

    def explained(self) -> str:
        """Return the output of `kubectl elasticjob explain`."""
        return self.ns.plugin("explain", NAME)


@pytest.fixture(scope="module")
def told(ns: JobNamespace, report: Report) -> Told:
    script = {"telling.py": SCRIPT.read_text()}
    ns.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": script},
        job(
            NAME,
            {"command": ["python3", f"{FOLDER}/telling.py"]},
            nodes=2,
            most=3,
            trainer={"volumeMounts": [{"name": "script", "mountPath": FOLDER}]},
            pod={
                "terminationGracePeriodSeconds": GRACE_SECONDS,
                "volumes": [{"name": "script", "configMap": {"name": NAME}}],
            },
            elasticity={"scaleUp": "AfterCheckpoint", "scaleUpMaxWaitSeconds": 600},
            recovery={"hangTimeoutSeconds": HANG_SECONDS},
        ),
    )
    ns.running(NAME, 2)
    return Told(ns, report)


def test_library_is_available_in_pods(told: Told) -> None:
    (pod, *_) = told.settled()
    ((_, _, library), *_) = _BEGUN.findall(told.ns.log(pod))
    assert library.startswith("/elasticjob/")
    look = "from importlib.util import find_spec as find; print(find('torch'), find('elasticjob'))"
    found = told.ns.exec(pod, "trainer", f'python3 -c "{look}"')
    assert found.startswith("ModuleSpec(name='torch'")
    assert found.endswith(" None\n"), "the image itself has none"


def test_checkpoint_is_shown_in_status(told: Told) -> None:
    (pod, *_) = told.settled()
    told.ask(pod, "save")
    saved: int = told.ns.until(lambda: told.saved(told.round), "a checkpoint")
    told.ns.until(
        lambda: saved in [m.get("checkpointStep") for m in told.status["members"]],
        f"step {saved} in the status",  # progress alone is written every 30 s
    )


def test_replacement_workers_start_warm(told: Told) -> None:
    pods = told.settled(LEARNING_STEPS)
    victim, restarts = pods[1], told.status["restarts"]
    cost = told.recovered("worker killed", lambda: told.ns.kill_worker(victim), nodes=len(pods))
    assert (cost["cause"], cost["members"]) == ("failure", [victim])
    assert cost["coldNodes"] == 0
    assert cost["recoveryMs"] < 1000 * RECOVERY_SECONDS
    told.ns.until(lambda: told.status["restarts"] == restarts + 1, "the charge", 20)
    explained = told.explained()
    assert f"Last interruption: a worker of {victim} failed" in explained
    assert ", recovered in " in explained
    assert f"on {victim} (" in explained
    assert "a signal ended it: " in explained
    told.ns.until(lambda: "Recovered" in told.ns.reasons(NAME), "the event", 20)


def test_hung_rank_is_reported_with_its_stack(told: Told) -> None:
    pods = told.settled()
    number, restarts = told.round, told.status["restarts"]
    (victim,) = [m["pod"] for m in told.status["members"] if m["rank"] == 1]
    told.recovered("hang", lambda: told.ask(victim, "hang"), nodes=len(pods))
    failure = told.ns.until(
        lambda: f if (f := told.status["lastFailure"])["round"] == number else None, "the failure"
    )
    assert (failure["class"], failure["rank"], failure["pod"]) == ("Hang", 1, victim)
    assert failure["message"].startswith(f"no progress for {HANG_SECONDS} s after step ")
    assert ": it was in read_batch (telling.py, line " in failure["message"]
    assert failure["traceback"].startswith("Stack (most recent call last):")
    assert "in main\n" in failure["traceback"]
    assert "in read_batch" in failure["traceback"]
    told.ns.until(
        lambda: any(
            reason == "WorkerFailed" and victim in text and "it was in read_batch" in text
            for reason, text in told.ns.events(NAME)
        ),
        "the event",
        20,
    )
    assert "it was in read_batch" in told.explained()
    told.ns.until(lambda: told.status["restarts"] == restarts + 1, "the charge", 20)


def test_newcomer_joins_after_a_checkpoint(told: Told) -> None:
    pods = told.settled()
    number, nodes = told.round, len(pods) + 1
    told.ns.kubectl("scale", f"ej/{NAME}", f"--replicas={nodes}")
    told.ns.until(
        lambda: (
            "wait for the next checkpoint" in told.status["rendezvous"].get("waitingReason", "")
        ),
        "a newcomer that waits",
        100,
    )
    newcomer = max(told.ns.active(NAME))
    assert f"{newcomer} waits for the next checkpoint, for at most 600 s" in told.explained()
    told.ns.advances(NAME, told.ns.latest(NAME) + 10)
    assert told.round == number
    cost = told.recovered("join", lambda: told.ask(pods[0], "save"), nodes=nodes)
    assert (cost["cause"], cost["members"]) == ("join", [newcomer])
    assert told.begun(number + 1) == told.saved(number)
    assert told.status["rendezvous"].get("waitingReason") is None


def test_deleted_pod_checkpoints_first_and_loses_no_step(told: Told) -> None:
    pods = told.settled()
    number, victim = told.round, pods[-1]
    before = told.saved(number)
    began = time.monotonic()
    delete = ("delete", "pod", victim, "--wait=false")
    cost = told.recovered("pod deleted", lambda: told.ns.kubectl(*delete), nodes=len(pods) - 1)
    assert time.monotonic() - began < GRACE_SECONDS
    assert (cost["cause"], cost["members"]) == ("leave", [victim])
    saved = told.saved(number)
    assert saved > before
    assert told.begun(number + 1) == saved
    (_, since) = told.ns.log(pods[0]).split(f"round {number} begins at ")
    made = [int(step) for step in re.findall(r"^(?:\[\d+\] )?step (\d+) ", since, re.MULTILINE)]
    assert made == list(range(made[0], made[0] + len(made))), "none is lost, none made twice"
    assert made[-1] > saved


def test_suspended_job_saves_its_last_step(told: Told) -> None:
    """The last test of this module: the pods' checkpoints are gone with them."""
    told.ns.advances(NAME, told.ns.latest(NAME) + 2)  # a replacement may wait for a checkpoint
    told.ns.patch(NAME, {"runPolicy": {"suspend": True}})
    told.ns.in_phase(NAME, "Suspended")
    stop = told.status["lastStop"]
    assert (stop["reason"], stop["result"]) == ("Suspended", "Saved")
    assert stop["checkpointStep"] == stop["step"] > 0
    assert f"saved at step {stop['step']}" in told.ns.condition(NAME, "Suspended")["message"]
    told.ns.without_pods(NAME)
    assert f"Saved at step {stop['step']}." in told.explained()
