"""Failing scripts: attribution, message, and the end of the job."""

from __future__ import annotations

import pytest

from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import job

pytestmark = pytest.mark.timeout(600, func_only=True)

CULPRIT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def read_batch(step):
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("poisoned batch 7")
for step in range(1000):
    read_batch(step)
    dist.all_reduce(torch.ones(1))
"""
"""Script whose rank 1 fails by itself; rank 0 fails because its peer is gone."""

SEGFAULT = "import os, signal, time; time.sleep(1); os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture(scope="module")
def failed_jobs(ns: JobNamespace) -> JobNamespace:
    """Return the namespace with all failing jobs applied at once."""
    ns.apply(
        job("culprit", {"command": ["python3", "-c", CULPRIT]}, nodes=2, least=2, maxRestarts=1),
        job("signalled", {"command": ["python3", "-c", SEGFAULT]}, nodes=1, maxRestarts=0),
        job(
            "no-python",
            {"command": ["sh", "-c", "sleep 100"]},
            nodes=1,
            trainer={"image": "docker.io/library/busybox:1.35"},
        ),
    )
    return ns


def test_first_failure_is_attributed_to_its_worker(failed_jobs: JobNamespace) -> None:
    status = failed_jobs.in_phase("culprit", "Failed", "Succeeded")
    assert status["phase"] == "Failed"
    assert status["restarts"] == 2, "maxRestarts is 1: one more failure ends the job"
    failure = status["firstFailure"]
    assert (failure["rank"], failure["pod"]) == (1, "culprit-1")
    # Torch's threads may abort at the exit of a script that leaves its process group open.
    assert failure.get("exitCode") == 1 or failure["signal"] == 6
    assert failure["class"] == "UserError"
    assert failure["message"] == "ValueError: poisoned batch 7"
    assert failure["traceback"].startswith("Traceback (most recent call last):")
    assert "in read_batch" in failure["traceback"]
    assert failure["nodeName"] == failed_jobs.pods("culprit")["culprit-1"]["spec"]["nodeName"]
    failed = failed_jobs.condition("culprit", "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "WorkersFailed")
    failed_jobs.kubectl("wait", "--for=condition=Finished", "ej/culprit", "--timeout=5s")


def test_describe_shows_job_history_in_events(failed_jobs: JobNamespace) -> None:
    failed_jobs.in_phase("culprit", "Failed")
    failed_jobs.until(lambda: "Failed" in failed_jobs.reasons("culprit"), "the last event")
    reasons = failed_jobs.reasons("culprit")
    # The second round may have formed before the operator looked.
    story = ["PodsCreated", "Running", "WorkerFailed", "Failed"]
    places = [reasons.index(reason) for reason in story]
    assert places == sorted(places), reasons
    described = failed_jobs.kubectl("describe", "ej", "culprit")
    events = described[described.index("\nEvents:") :]
    assert "poisoned batch 7" in events
    assert "rank 1 (culprit-1" in events
    assert "WorkersFailed" in events
    assert "round 1 is final with 2 nodes" in events
    assert "round 2 is final with 2 nodes" in events


def test_worker_killed_by_signal_reports_the_signal(failed_jobs: JobNamespace) -> None:
    status = failed_jobs.in_phase("signalled", "Failed", "Succeeded")
    assert status["phase"] == "Failed"
    failure = status["firstFailure"]
    assert (failure["rank"], failure.get("exitCode"), failure["signal"]) == (0, None, 11)
    assert failure["class"] == "Signal"


def test_image_without_python_fails_after_several_pods_with_remedy(
    failed_jobs: JobNamespace,
) -> None:
    status = failed_jobs.in_phase("no-python", "Failed", within=120)
    assert status["restarts"] == 0
    failed = failed_jobs.condition("no-python", "Failed")
    assert failed["reason"] == "LaunchFailed"
    assert "the image must have python3" in failed["message"]
