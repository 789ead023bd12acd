"""Deletion of a running job's objects by users, on a real API server."""

from __future__ import annotations

from elasticjob_operator.domain.manifests.names import secret_name, service_name
from elasticjob_operator.kubernetes.client import SECRETS, SERVICES, Kube
from elasticjob_operator.model import ElasticJob, parse_manifest
from elasticjob_operator.reconcile.jobs import RECHECK_SECONDS, JobKey, JobMemory
from elasticjob_operator.reconcile.owned_objects import OwnedObjects
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob, run


def _job(server: ApiServer, namespace: str) -> ElasticJob:
    body = elasticjob(rendezvous={"backend": "C10d"})
    path = ELASTICJOBS_PATH.format(namespace)
    server.request("POST", path, body)
    started = {"status": {"phase": "Pending"}}
    return parse_manifest(server.patch(f"{path}/job/status", started))


def test_deleted_secret_is_restored_with_same_content(
    api_server: ApiServer, namespace: str
) -> None:
    """Running agents keep using its content, and those of new pods must share it."""
    job = _job(api_server, namespace)

    async def scenario(kube: Kube) -> None:
        now = 0.0
        owned_objects = OwnedObjects(kube, lambda: now)
        memory = JobMemory(JobKey(namespace, "job"), job.metadata.uid)
        agents = AgentsSource(AgentPoller(lambda *_: None), kube, namespace, job.metadata.uid)

        async def ensure(needed: bool) -> None:
            await owned_objects.ensure(job, memory, agents, needed=needed, renew=False)

        async def remove() -> None:
            for kind, name in ((SECRETS, secret_name(job)), (SERVICES, service_name(job))):
                found = await kube.get(kind, namespace, name)
                await kube.delete(kind, namespace, name, uid=found["metadata"]["uid"])

        await ensure(needed=True)
        first = await kube.get(SECRETS, namespace, secret_name(job))
        assert first["data"]
        await remove()
        now += RECHECK_SECONDS + 1
        await ensure(needed=False)
        again = await kube.get(SECRETS, namespace, secret_name(job))
        assert again["data"] == first["data"]
        # A pod about to be created needs them now, not at the next recheck.
        await remove()
        now += 60
        await ensure(needed=True)
        once_more = await kube.get(SECRETS, namespace, secret_name(job))
        assert once_more["data"] == first["data"]
        assert await kube.get(SERVICES, namespace, service_name(job))

    run(api_server, scenario)
