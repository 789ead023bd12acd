"""Grace period of a local pod: equal to a cluster pod's and to the one in its members' bounds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticjob_cli.local.cluster import LocalCluster
from elasticjob_cli.local.control import ControlCommands
from elasticjob_cli.local.job_store import JobFolder
from elasticjob_cli.local.kubelet import Kubelet, LocalPod, PodFiles
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.plan.actions import DeletePod, DeleteReason
from elasticjob_operator.domain.plan.backends import rendezvous_params
from elasticjob_operator.model.parse import parse_manifest
from elasticjob_operator.reconcile.cluster import Applied, ReconcileContext

UID = "11111111-2222-3333-4444-555555555555"


class RecordingKubelet:
    """Kubelet with one pod, which records the grace period of its deletion."""

    def __init__(self, folder: Path) -> None:
        files = PodFiles("job-0", UID, 1, folder / "sock", folder / "logs")
        self.pods = {UID: LocalPod(0, files, datetime.now(UTC))}
        self.graces: list[float] = []

    def find(self, name: str) -> LocalPod:
        return self.pods[UID]

    def delete(self, uid: str, grace_seconds: float) -> None:
        self.graces.append(grace_seconds)


def stored(folder: Path, stop_grace: int, pod_grace: int | None) -> StoredJob:
    pod: dict[str, Any] = {"containers": [{"name": "trainer", "command": ["true"]}]}
    if pod_grace is not None:
        pod["terminationGracePeriodSeconds"] = pod_grace
    spec = {
        "maxNodes": 1,
        "recovery": {"stopGraceSeconds": stop_grace},
        "template": {"spec": pod},
    }
    job = parse_manifest(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "job"},
            "spec": spec,
        }
    )
    return StoredJob(job, JobFolder("default", "job"), lambda: None, lambda _: None)


@pytest.mark.parametrize(
    ("stop_grace", "pod_grace", "seconds"), [(10, None, 30), (60, None, 80), (60, 5, 5)]
)
def test_pods_are_killed_after_the_grace_of_their_members(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_grace: int,
    pod_grace: int | None,
    seconds: int,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    recorded = RecordingKubelet(tmp_path)
    kubelet = cast("Kubelet", recorded)
    job = stored(tmp_path, stop_grace, pod_grace)

    cluster = LocalCluster(kubelet, job, lambda _: None)
    deletion, applied = DeletePod("job-0", UID, next(iter(DeleteReason))), Applied()
    context = cast("ReconcileContext", SimpleNamespace())
    asyncio.run(cluster.delete_pods(context, [deletion], applied))
    assert applied.actions == [deletion]
    commands = ControlCommands(job, kubelet, cast("Processes", SimpleNamespace()), lambda _: None)
    commands.fault("drain", "job-0")

    assert recorded.graces == [seconds, seconds]
    assert asyncio.run(commands.act("delete", {})) == {"graceSeconds": 2 * seconds}
    assert rendezvous_params(job.job, 1, 1).leave_seconds == seconds
