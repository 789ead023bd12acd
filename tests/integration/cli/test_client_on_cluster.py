"""Python client of a cluster's jobs: a real API server and kubectl, without an operator."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from elasticjob import Client, ElasticJob
from elasticjob_cli.client import BadInput, CommandError, JobFailed
from elasticjob_operator.model import Phase
from tests.cluster.programs import programs
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob

WAIT_SECONDS = 120.0


@pytest.fixture
def client(
    api_server: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Client:
    monkeypatch.setenv("PATH", f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ELASTICJOB_PLACE", raising=False)
    return Client(namespace=namespace, kubeconfig=api_server.kubeconfig())


def test_job_is_applied_scaled_suspended_and_deleted(
    api_server: ApiServer, namespace: str, client: Client
) -> None:
    path = f"{ELASTICJOBS_PATH.format(namespace)}/job"
    definition = ElasticJob.from_object(elasticjob(minNodes=1, maxNodes=5, nodeIncrement=2))
    job = client.submit(definition)
    assert [one.name for one in client.jobs()] == [client.job("job").name] == ["job"]
    assert job.scale(4) == 3
    assert api_server.request("GET", path)["spec"]["nodes"] == 4
    job.suspend()
    assert api_server.request("GET", path)["spec"]["runPolicy"]["suspend"] is True
    client.job("job").resume()
    assert job.read().spec.run_policy.suspend is False
    assert job.phase is None
    assert job.rounds() == []
    assert job.explain()
    with pytest.raises(CommandError, match='job "job" has no pods'):
        job.logs()
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s"):
        job.wait(0.1)
    job.delete()
    assert client.jobs() == []
    with pytest.raises(CommandError, match='"job" not found'):
        job.wait()


def test_job_is_watched_until_it_finishes_in_a_running_event_loop(
    api_server: ApiServer, namespace: str, client: Client
) -> None:
    jobs = ELASTICJOBS_PATH.format(namespace)

    def become(phase: str, *rounds: dict) -> None:
        status = {"phase": phase, "rounds": list(rounds)}
        api_server.patch(f"{jobs}/job/status", {"status": status})

    async def notebook() -> list[Phase | None]:
        job = await client.submit_async(ElasticJob.from_object(elasticjob()))
        assert job.phase is None
        await asyncio.to_thread(become, "Running")
        phases = []
        async with asyncio.timeout(WAIT_SECONDS):
            async for status in job.watch():
                phases.append(status.phase)
                await asyncio.to_thread(become, "Succeeded")
        assert (await job.result_async(WAIT_SECONDS)).status.phase is Phase.SUCCEEDED
        return phases

    assert asyncio.run(notebook()) == [Phase.RUNNING, Phase.SUCCEEDED]
    assert client.submit(ElasticJob.from_object(elasticjob("second"))).phase is None


def test_failed_job_raises_its_condition(
    api_server: ApiServer, namespace: str, client: Client
) -> None:
    job = client.submit(ElasticJob.from_object(elasticjob()))
    condition = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "4 restarts",
        "lastTransitionTime": "2026-11-24T00:00:00Z",
    }
    status = {"phase": "Failed", "conditions": [condition]}
    path = f"{ELASTICJOBS_PATH.format(namespace)}/job/status"
    later = threading.Timer(0.5, api_server.patch, (path, {"status": status}))
    later.start()
    with pytest.raises(JobFailed, match="Failed: BackoffLimitExceeded: 4 restarts") as failed:
        job.result(WAIT_SECONDS)
    later.join()
    assert failed.value.result.status.phase is Phase.FAILED


def test_arguments_choose_the_place_as_the_options_of_verbs_do(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(ElasticJob.from_object(elasticjob()))
    assert Client(namespace=namespace).jobs() == []
    with pytest.raises(BadInput, match="leave out one of the two"):
        Client(cluster=False, context="test")
    with pytest.raises(BadInput, match="python must not be given on a cluster"):
        client.submit(ElasticJob.from_object(elasticjob()), python="python3")
    monkeypatch.setenv("ELASTICJOB_PLACE", "cluster")
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    with pytest.raises(CommandError, match="no cluster is configured"):
        Client(namespace=namespace).jobs()
