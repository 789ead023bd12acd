"""Grace period of a local pod: equal to a cluster pod's and to the one in its members' bounds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticjob_cli.local.apply import Applier
from elasticjob_cli.local.pods import Kubelet, LocalPod, PodFiles
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.state import JobFolder
from elasticjob_cli.local.stored import StoredJob
from elasticjob_cli.local.verbs import Verbs
from elasticjob_operator.core.actions import DeletePod
from elasticjob_operator.core.bounds import bounds_of
from elasticjob_operator.core.endings import Plan
from elasticjob_operator.core.sizes import wanted_size
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_operator.model.enums import Phase
from elasticjob_operator.model.parse import parse_manifest

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

    applier = Applier(None, kubelet, str, job, lambda _: None)
    deletion = DeletePod("job-0", UID, next(iter(DeleteReason)))
    asyncio.run(applier.apply(Plan((deletion,), Phase.RUNNING, wanted_size(job.job.spec))))
    verbs = Verbs(job, kubelet, cast("Processes", SimpleNamespace()), lambda _: None)
    verbs.fault("drain", "job-0")

    assert recorded.graces == [seconds, seconds]
    assert asyncio.run(verbs.act("delete", {})) == {"graceSeconds": seconds}
    assert bounds_of(job.job, 1, 1).leave_seconds == seconds
