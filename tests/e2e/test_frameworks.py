"""Examples of frameworks in pods: a killed worker, and a suspension without a lost step.

The trainer's image has torch and scikit-learn, which the scripts of these examples need. The pods
of a job share a claim, whose volume belongs to one node: the scheduler places all of them there.
"""

from __future__ import annotations

import pytest

from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import job
from tests.e2e.report import Report
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(600, func_only=True)

COMMANDS = {
    "torchrun": ["torchrun", "--nproc-per-node=1", "/example/train.py"],
    "fsdp2": ["python3", "/example/train.py"],
}
EVERY = 50
"""Steps between two checkpoints of the examples; ten seconds."""
OPTIONS = ["--steps", "100000", "--step-seconds", "0.2", "--folder", "/shared/checkpoints"]


def objects(framework: str) -> list[Json]:
    """Return the script, the claim and the job of an example."""
    script = {"train.py": (ROOT / "examples" / framework / "train.py").read_text()}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}
    mounts = [
        {"name": "script", "mountPath": "/example"},
        {"name": "shared", "mountPath": "/shared"},
    ]
    volumes = [
        {"name": "script", "configMap": {"name": framework}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": framework}},
    ]
    meta = {"name": framework}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": script},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim},
        job(
            framework,
            {"command": COMMANDS[framework], "args": OPTIONS},
            trainer={"volumeMounts": mounts},
            pod={"volumes": volumes},
        ),
    ]


def saved_step(ns: JobNamespace, name: str) -> int:
    """Return the step of the newest checkpoint, or snapshot in storage; 0 without one."""
    status = ns.status(name)
    stored = (status.get("snapshots") or {}).get("storedStep") or 0
    members = status.get("members") or ()
    return max((member.get("checkpointStep") or 0 for member in members), default=0) or int(stored)


def first_step(ns: JobNamespace, name: str, after: int) -> Json | None:
    """Return the status entry of a round after `after` in which all workers have stepped."""
    rounds = ns.status(name).get("rounds") or ()
    return next((e for e in rounds if e["round"] > after and e.get("firstStepMs")), None)


@pytest.mark.parametrize("framework", COMMANDS)
def test_example_in_pods_resumes_after_a_killed_worker_and_saves_before_suspension(
    ns: JobNamespace, report: Report, framework: str
) -> None:
    ns.apply(*objects(framework))
    number = int(ns.running(framework, 2)["rendezvous"]["round"])
    ns.until(lambda: saved_step(ns, framework) >= EVERY, "a periodic checkpoint", 120)

    ns.kill_worker(f"{framework}-1")
    ns.running(framework, 2, after=number)
    cost = ns.until(lambda: first_step(ns, framework, number), "a step of the next round", 120)
    report.add("frameworks", framework=framework, **cost)
    assert (cost["cause"], cost["members"]) == ("failure", [f"{framework}-1"])

    ns.patch(framework, {"runPolicy": {"suspend": True}})
    ns.in_phase(framework, "Suspended")
    stop = ns.status(framework)["lastStop"]
    assert (stop["reason"], stop["result"]) == ("Suspended", "Saved")
    assert stop["checkpointStep"] == stop["step"] > EVERY, "the next round began at the checkpoint"
    ns.delete(framework)
