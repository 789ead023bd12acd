"""Deletion of a running job's objects by users, on a real API server."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elasticjob_operator.domain.manifests.names import (
    network_policy_name,
    secret_name,
    service_name,
)
from elasticjob_operator.domain.manifests.owned_objects import PolicyPeer, network_policy
from elasticjob_operator.kubernetes.client import (
    BUDGETS,
    NETWORK_POLICIES,
    SECRETS,
    SERVICES,
    Kube,
)
from elasticjob_operator.model import ElasticJob, parse_manifest
from elasticjob_operator.reconcile.cluster import NameTaken
from elasticjob_operator.reconcile.job_memory import RECHECK_SECONDS, JobKey, JobMemory
from elasticjob_operator.reconcile.owned_objects import Credentials, OwnedObjects
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob, run


def credentials(kube: Kube) -> Credentials:
    return Credentials(timedelta(days=30), kube.now, lambda subject, found: None)


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
        owned_objects = OwnedObjects(kube, lambda: now, credentials(kube))
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


def test_budget_with_a_users_max_unavailable_is_corrected(
    api_server: ApiServer, namespace: str
) -> None:
    """The API server admits either minAvailable or maxUnavailable."""
    job = _job(api_server, namespace)

    async def scenario(kube: Kube) -> None:
        owned_objects = OwnedObjects(kube, lambda: 0.0, credentials(kube))
        memory = JobMemory(JobKey(namespace, "job"), job.metadata.uid)
        await owned_objects.ensure_budget(job, memory, ready=1)
        made = await kube.get(BUDGETS, namespace, "job")
        edited = {"minAvailable": None, "maxUnavailable": 1}
        await kube.patch(BUDGETS, namespace, "job", {"spec": edited})
        await owned_objects.ensure_budget(job, memory, ready=9)
        mended = await kube.get(BUDGETS, namespace, "job")
        assert mended["spec"] == {**made["spec"], "minAvailable": job.spec.min_nodes}

    run(api_server, scenario)


OPERATOR = PolicyPeer("system", (("app", "operator"),))


def test_network_policy_is_created_corrected_and_restored(
    api_server: ApiServer, namespace: str
) -> None:
    job = _job(api_server, namespace)
    name = network_policy_name(job)

    async def scenario(kube: Kube) -> None:
        now = 0.0
        owned_objects = OwnedObjects(kube, lambda: now, credentials(kube), OPERATOR)
        memory = JobMemory(JobKey(namespace, "job"), job.metadata.uid)
        agents = AgentsSource(AgentPoller(lambda *_: None), kube, namespace, job.metadata.uid)

        async def ensure(needed: bool) -> None:
            await owned_objects.ensure(job, memory, agents, needed=needed, renew=False)

        wanted = network_policy(job, OPERATOR)
        await ensure(needed=True)
        made = await kube.get(NETWORK_POLICIES, namespace, name)
        assert made["spec"] == wanted["spec"]
        assert made["metadata"]["ownerReferences"] == wanted["metadata"]["ownerReferences"]
        now += RECHECK_SECONDS + 1
        await ensure(needed=False)
        kept = await kube.get(NETWORK_POLICIES, namespace, name)
        assert kept["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        opened = {
            "podSelector": {"matchLabels": {"app": "none"}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{}],
            "ingress": [{}],
        }
        await kube.patch(NETWORK_POLICIES, namespace, name, {"spec": opened})
        now += RECHECK_SECONDS + 1
        await ensure(needed=False)
        mended = await kube.get(NETWORK_POLICIES, namespace, name)
        assert mended["spec"] == wanted["spec"]
        # A pod about to be created needs it now.
        await kube.delete(NETWORK_POLICIES, namespace, name, uid=mended["metadata"]["uid"])
        now += 60
        await ensure(needed=True)
        again = await kube.get(NETWORK_POLICIES, namespace, name)
        assert again["spec"] == wanted["spec"]

    run(api_server, scenario)


def test_network_policy_of_another_owner_is_not_adopted(
    api_server: ApiServer, namespace: str
) -> None:
    job = _job(api_server, namespace)
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    theirs = {"metadata": {"name": network_policy_name(job)}, "spec": {"podSelector": {}}}
    api_server.request("POST", path, theirs)

    async def scenario(kube: Kube) -> None:
        owned_objects = OwnedObjects(kube, lambda: 0.0, credentials(kube), OPERATOR)
        memory = JobMemory(JobKey(namespace, "job"), job.metadata.uid)
        agents = AgentsSource(AgentPoller(lambda *_: None), kube, namespace, job.metadata.uid)
        with pytest.raises(NameTaken, match="networkpolicy job-elasticjob exists"):
            await owned_objects.ensure(job, memory, agents, needed=True, renew=False)

    run(api_server, scenario)
