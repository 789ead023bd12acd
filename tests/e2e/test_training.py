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

pytestmark = pytest.mark.timeout(600, func_only=True)

NAME = "training"
SCRIPT = Path(__file__).parent / "training_script.py"
FOLDER = "/script"
HANG_SECONDS = 8
GRACE_SECONDS = 60
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
class TrainingJob:
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
        training = [_SAVED.findall(log) for log in self._logs()]
        return max(
            (int(s) for each in training for s, found in each if int(found) == number), default=0
        )

    def _logs(self) -> list[str]:
        """Return the trainers' output; a pod may be about to start in the place of another."""
        started = self.ns.started(NAME)
        return [self.ns.log(pod) for pod in self.ns.active(NAME) if pod in started]

    def explained(self) -> str:
        """Return the output of `kubectl elasticjob explain`."""
        return self.ns.plugin("explain", NAME)


@pytest.fixture(scope="module")
def training(ns: JobNamespace, report: Report) -> TrainingJob:
    script = {"training_script.py": SCRIPT.read_text()}
    ns.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": script},
        job(
            NAME,
            {"command": ["python3", f"{FOLDER}/training_script.py"]},
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
    return TrainingJob(ns, report)


def test_library_is_available_in_pods(training: TrainingJob) -> None:
    (pod, *_) = training.settled()
    ((_, _, library), *_) = _BEGUN.findall(training.ns.log(pod))
    assert library.startswith("/elasticjob/")
    look = "from importlib.util import find_spec as find; print(find('torch'), find('elasticjob'))"
    found = training.ns.exec(pod, "trainer", f'python3 -c "{look}"')
    assert found.startswith("ModuleSpec(name='torch'")
    assert found.endswith(" None\n"), "the image itself has none"


def test_checkpoint_is_shown_in_status(training: TrainingJob) -> None:
    (pod, *_) = training.settled()
    training.ask(pod, "save")
    saved: int = training.ns.until(lambda: training.saved(training.round), "a checkpoint")
    training.ns.until(
        lambda: saved in [m.get("checkpointStep") for m in training.status["members"]],
        f"step {saved} in the status",  # progress alone is written every 30 s
    )


def test_replacement_workers_start_warm(training: TrainingJob) -> None:
    pods = training.settled(LEARNING_STEPS)
    victim, restarts = pods[1], training.status["restarts"]
    cost = training.recovered(
        "worker killed", lambda: training.ns.kill_worker(victim), nodes=len(pods)
    )
    assert (cost["cause"], cost["members"]) == ("failure", [victim])
    assert cost["coldNodes"] == 0
    assert cost["recoveryMs"] < 1000 * RECOVERY_SECONDS
    training.ns.until(lambda: training.status["restarts"] == restarts + 1, "the charge")
    explained = training.explained()
    assert f"Last interruption: a worker of {victim} failed" in explained
    assert ", recovered in " in explained
    assert f"on {victim} (" in explained
    assert "a signal ended it: " in explained
    training.ns.until(lambda: "Recovered" in training.ns.reasons(NAME), "the event")


def test_hung_rank_is_reported_with_its_stack(training: TrainingJob) -> None:
    pods = training.settled()
    number, restarts = training.round, training.status["restarts"]
    (victim,) = [m["pod"] for m in training.status["members"] if m["rank"] == 1]
    training.recovered("hang", lambda: training.ask(victim, "hang"), nodes=len(pods))
    failure = training.ns.until(
        lambda: f if (f := training.status["lastFailure"])["round"] == number else None,
        "the failure",
    )
    assert (failure["class"], failure["rank"], failure["pod"]) == ("Hang", 1, victim)
    assert failure["message"].startswith(f"no progress for {HANG_SECONDS} s after step ")
    assert ": it was in read_batch (training_script.py, line " in failure["message"]
    assert failure["traceback"].startswith("Stack (most recent call last):")
    assert "in main\n" in failure["traceback"]
    assert "in read_batch" in failure["traceback"]
    training.ns.until(
        lambda: any(
            reason == "WorkerFailed" and victim in text and "it was in read_batch" in text
            for reason, text in training.ns.events(NAME)
        ),
        "the event",
    )
    assert "it was in read_batch" in training.explained()
    training.ns.until(lambda: training.status["restarts"] == restarts + 1, "the charge")


def test_newcomer_joins_after_a_checkpoint(training: TrainingJob) -> None:
    pods = training.settled()
    number, nodes = training.round, len(pods) + 1
    training.ns.kubectl("scale", f"ej/{NAME}", f"--replicas={nodes}")
    training.ns.until(
        lambda: (
            "wait for the next checkpoint" in training.status["rendezvous"].get("waitingReason", "")
        ),
        "a newcomer that waits",
        100,
    )
    newcomer = max(training.ns.active(NAME))
    assert f"{newcomer} waits for the next checkpoint, for at most 600 s" in training.explained()
    training.ns.advances(NAME, training.ns.latest(NAME) + 10)
    assert training.round == number
    cost = training.recovered("join", lambda: training.ask(pods[0], "save"), nodes=nodes)
    assert (cost["cause"], cost["members"]) == ("join", [newcomer])
    assert training.begun(number + 1) == training.saved(number)
    assert training.status["rendezvous"].get("waitingReason") is None


def test_deleted_pod_checkpoints_first_and_loses_no_step(training: TrainingJob) -> None:
    pods = training.settled()
    number, victim = training.round, pods[-1]
    before = training.saved(number)
    began = time.monotonic()
    delete = ("delete", "pod", victim, "--wait=false")
    cost = training.recovered(
        "pod deleted", lambda: training.ns.kubectl(*delete), nodes=len(pods) - 1
    )
    assert time.monotonic() - began < GRACE_SECONDS
    assert (cost["cause"], cost["members"]) == ("leave", [victim])
    saved = training.saved(number)
    assert saved > before
    assert training.begun(number + 1) == saved
    (_, since) = training.ns.log(pods[0]).split(f"round {number} begins at ")
    made = [int(step) for step in re.findall(r"^(?:\[\d+\] )?step (\d+) ", since, re.MULTILINE)]
    assert made == list(range(made[0], made[0] + len(made))), "none is lost, none made twice"
    assert made[-1] > saved


def test_suspended_job_saves_its_last_step(training: TrainingJob) -> None:
    """The last test of this module: the pods' checkpoints are gone with them."""
    training.ns.advances(
        NAME, training.ns.latest(NAME) + 2
    )  # a replacement may wait for a checkpoint
    training.ns.patch(NAME, {"runPolicy": {"suspend": True}})
    training.ns.in_phase(NAME, "Suspended")
    stop = training.status["lastStop"]
    assert (stop["reason"], stop["result"]) == ("Suspended", "Saved")
    assert stop["checkpointStep"] == stop["step"] > 0
    assert f"saved at step {stop['step']}" in training.ns.condition(NAME, "Suspended")["message"]
    training.ns.without_pods(NAME)
    assert f"Saved at step {stop['step']}." in training.explained()
