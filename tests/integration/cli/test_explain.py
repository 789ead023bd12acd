"""Command `elasticjob explain` on a cluster: a real API server, kubectl, the operator's status."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from elasticjob_operator.domain.manifests.names import pod_labels
from elasticjob_operator.domain.observed.pod_state import observed_pod
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import parse_manifest
from tests.cluster.programs import programs
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, Json, elasticjob, pod
from tests.integration.local_rig import PYTHONPATH
from tests.unit.operator.builders import NOW, final_round, observed
from tests.unit.operator.domain.observed.raw_pods import condition

GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: none."


def explained(server: ApiServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}"
    where = ("--kubeconfig", str(server.kubeconfig()))
    return subprocess.run(
        [sys.executable, "-m", "elasticjob_cli", "explain", *arguments, *where],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": path, "PYTHONPATH": PYTHONPATH},
    )


def stored(server: ApiServer, namespace: str) -> list[str]:
    """Store a job of two nodes, one of them Pending, with the operator's status for it."""
    jobs, pods = ELASTICJOBS_PATH.format(namespace), f"/api/v1/namespaces/{namespace}/pods"
    document: Any = server.request("POST", jobs, elasticjob(minNodes=1, maxNodes=2, nodes=2))
    job = parse_manifest(document)
    for index in range(2):
        made = pod(f"job-{index}")
        made["metadata"]["labels"] = pod_labels(job, index, 1)
        server.request("POST", pods, made)
    pending = condition("PodScheduled", False, NOW, reason="Unschedulable", message=GPU)
    server.patch(f"{pods}/job-1/status", {"status": {"conditions": [pending]}})
    listed = [server.request("GET", f"{pods}/job-{index}") for index in range(2)]
    found = tuple(p for raw in listed if (p := observed_pod(raw, "trainer", {})) is not None)
    here = observed(*found, view=final_round(1))
    status = next_status(job, here, here.rendezvous, NOW)
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    served: Json = server.patch(f"{jobs}/job/status", {"status": written})
    said: list[str] = served["status"]["explanation"]
    return said


def test_explanation_of_cluster_job_matches_its_status(
    api_server: ApiServer, namespace: str
) -> None:
    said = stored(api_server, namespace)
    done = explained(api_server, "job", "-n", namespace)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == said
    assert said == [
        "Training on 1 of 2 nodes (round 1, 1 worker) because job-1 is Pending: Insufficient "
        "nvidia.com/gpu.",
        "Free or add machines that fit, or reduce the template's requests.",
    ]


def test_missing_job_is_reported(api_server: ApiServer, namespace: str) -> None:
    done = explained(api_server, "nobody", "-n", namespace)
    assert done.returncode == 1
    assert 'elasticjobs.elasticjob.dev "nobody" not found' in done.stderr
