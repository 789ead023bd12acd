"""A job's Service, Secret and PodDisruptionBudget: made when absent, never adopted.

They are read by name alone, so the operator needs no right to list anybody's Secrets. What was
read is remembered with the job and read again now and then.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable

from elasticjob_operator.agent_status import Agents
from elasticjob_operator.core import children
from elasticjob_operator.core.access import Access, access_of, data_of, given_access
from elasticjob_operator.core.budget import min_available
from elasticjob_operator.core.names import budget_name, secret_name, service_name
from elasticjob_operator.etcd_access import access_for
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import RECHECK_SECONDS, JobMemory
from elasticjob_operator.kube import (
    BUDGETS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    Json,
    Kind,
    Kube,
    NotFound,
)
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.wakeups import Retry

PREDECESSOR_SECONDS = 60.0
"""For so long the children of a deleted job of the same name are waited for without a word."""

NEEDED_RECHECK_SECONDS = 10.0
"""How long it is believed where pods are to be made, which would wait for what is not there."""


class NameTaken(Exception):
    """An object of this name exists and is not the job's."""

    def __init__(self, kind: Kind, name: str) -> None:
        singular = kind.plural.removesuffix("s")
        super().__init__(
            f"{singular} {name} exists and is not this job's; delete it, or name the job otherwise"
        )


class Dependents:
    """The objects of all jobs. `clock` is monotonic."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock

    async def ensure(
        self, job: ElasticJob, memory: JobMemory, etcd: Etcd | Agents, *, needed: bool, renew: bool
    ) -> None:
        """Make Service and Secret what pods need, if they are `needed` or it is time to look.

        With `renew` the job's user in etcd is made anew as well.

        Raises:
            NameTaken: a stranger has the name.
        """
        access, age = memory.access, self._clock() - memory.checked_at
        if access is None:
            due = needed or isinstance(etcd, Agents)  # which answer whoever knows their key
        else:
            due = _is_stale(access, etcd)
            # Only whether they are there: what else is to be checked costs etcd more.
            if needed and age > NEEDED_RECHECK_SECONDS:
                due = due or await self._is_gone(job)
        if due or renew or age > RECHECK_SECONDS:
            await self._find_or_create(job, memory, SERVICES, children.service(job))
            memory.access = await self._ensure_access(job, memory, etcd)
            memory.checked_at = self._clock()

    async def _is_gone(self, job: ElasticJob) -> bool:
        """Whether somebody has deleted one of the two."""
        namespace = job.metadata.namespace
        for kind, name in ((SECRETS, secret_name(job)), (SERVICES, service_name(job))):
            if await self._get(kind, namespace, name) is None:
                return True
        return False

    async def ensure_budget(self, job: ElasticJob, memory: JobMemory, ready: int) -> None:
        """Make the budget what it should be, if the job wants one. Raises `NameTaken`."""
        least = min_available(job, ready)
        if least is None:
            await self.drop_budget(job, memory)
            return
        if memory.min_available == least and not self._is_old(memory):
            return
        name, namespace = budget_name(job), job.metadata.namespace
        wanted = children.budget(job, least)
        found = await self._find_or_create(job, memory, BUDGETS, wanted)
        changed = {
            key: value for key, value in wanted["spec"].items() if found["spec"].get(key) != value
        }
        if changed:
            patch = {"metadata": _preconditions(found), "spec": changed}
            await self._kube.patch(BUDGETS, namespace, name, patch)
        memory.min_available, memory.budget_checked_at = least, self._clock()

    async def drop_budget(self, job: ElasticJob, memory: JobMemory) -> None:
        """Delete the job's budget, if it has one: its pods may all be evicted."""
        if memory.min_available is None and not self._is_old(memory):
            return
        name, namespace = budget_name(job), job.metadata.namespace
        found = await self._get(BUDGETS, namespace, name)
        if found is not None and children.is_owned(job, found):
            await self._kube.delete(BUDGETS, namespace, name, uid=found["metadata"]["uid"])
        memory.min_available, memory.budget_checked_at = None, self._clock()

    def _is_old(self, memory: JobMemory) -> bool:
        return self._clock() - memory.budget_checked_at > RECHECK_SECONDS

    async def _ensure_access(
        self, job: ElasticJob, memory: JobMemory, etcd: Etcd | Agents
    ) -> Access:
        namespace, name = job.metadata.namespace, secret_name(job)
        raw = None if _is_new(job) else await self._get(SECRETS, namespace, name)
        if raw is not None:
            self._check_owner(job, memory, SECRETS, raw)
        before = access_of(raw) if raw else None
        # Agents that run have what a Secret held that is gone: those of new pods must fit to them.
        known = before or memory.access
        access = await access_for(etcd.users, namespace, job.metadata.uid, known, etcd.ca)
        if not etcd.own and (given := job.spec.rendezvous.secret_name):
            access = given_access(await self._kube.get(SECRETS, namespace, given), access.job_key)
        if raw is None:
            try:
                await self._kube.create(SECRETS, namespace, children.secret(job, access))
            except AlreadyExists as error:
                raise Retry(str(error)) from error
        elif access != before:
            patch = {"metadata": _preconditions(raw), "data": data_of(access)}
            await self._kube.patch(SECRETS, namespace, name, patch)
        return access

    async def _find_or_create(
        self, job: ElasticJob, memory: JobMemory, kind: Kind, wanted: Json
    ) -> Json:
        namespace, name = job.metadata.namespace, wanted["metadata"]["name"]
        found = None if _is_new(job) else await self._get(kind, namespace, name)
        if found is None:
            try:
                return await self._kube.create(kind, namespace, wanted)
            except AlreadyExists:
                found = await self._kube.get(kind, namespace, name)
        self._check_owner(job, memory, kind, found)
        return found

    def _check_owner(self, job: ElasticJob, memory: JobMemory, kind: Kind, found: Json) -> None:
        if children.is_owned(job, found):
            return
        name = found["metadata"]["name"]
        waited = self._clock() - memory.seen_at
        if children.is_of_predecessor(job, found) and waited < PREDECESSOR_SECONDS:
            raise Retry(f"{kind.plural} {name} of the deleted job of this name is still there")
        raise NameTaken(kind, name)

    async def _get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        try:
            return await self._kube.get(kind, namespace, name)
        except NotFound:
            return None


def _is_stale(access: Access, etcd: Etcd | Agents) -> bool:
    """Whether the Secret would hold something else by now."""
    if etcd.own:
        return access.ca != etcd.ca
    if not isinstance(etcd, Etcd) or not etcd.held:
        return False
    # What its author's own Secret held when it was read for the operator's client.
    data = {name: b64encode(value).decode() for name, value in etcd.held.items()}
    return given_access({"data": data}, access.job_key) != access


def _is_new(job: ElasticJob) -> bool:
    """Whether nothing was made of the job yet, so that its objects need not be looked for."""
    return job.status.phase is None


def _preconditions(raw: Json) -> Json:
    metadata = raw["metadata"]
    return {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
