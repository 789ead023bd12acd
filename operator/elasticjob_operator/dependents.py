"""A job's Service, Secret and PodDisruptionBudget: made when absent, never adopted.

They are read by name alone, so the operator needs no right to list anybody's Secrets. What was
read is remembered with the job and read again now and then.
"""

from __future__ import annotations

from collections.abc import Callable

from elasticjob_operator.core import children
from elasticjob_operator.core.access import Access, access_of, data_of, given_access
from elasticjob_operator.core.budget import min_available
from elasticjob_operator.core.names import budget_name, secret_name, service_name
from elasticjob_operator.etcd_access import access_for
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import JobMemory
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

RECHECK_SECONDS = 600.0
"""How long what was read is believed."""


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
        self, job: ElasticJob, memory: JobMemory, etcd: Etcd, *, needed: bool, renew: bool
    ) -> None:
        """Make Service and Secret what pods need, if they are `needed` or it is time to look.

        With `renew` the job's user in etcd is made anew as well.

        Raises:
            NameTaken: a stranger has the name.
        """
        access = memory.access
        old = self._clock() - memory.checked_at > RECHECK_SECONDS
        stale = access is not None and etcd.own and access.ca != etcd.ca
        if old or renew or stale or (needed and access is None):
            await self._find_or_create(job, SERVICES, service_name(job), children.service(job))
            memory.access = await self._ensure_access(job, etcd)
            memory.checked_at = self._clock()

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
        found = await self._get(BUDGETS, namespace, name)
        if found is None:
            found = await self._find_or_create(job, BUDGETS, name, wanted)
        elif not children.is_owned(job, found):
            raise NameTaken(BUDGETS, name)
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

    async def _ensure_access(self, job: ElasticJob, etcd: Etcd) -> Access:
        namespace, name = job.metadata.namespace, secret_name(job)
        raw = await self._get(SECRETS, namespace, name)
        if raw is not None and not children.is_owned(job, raw):
            raise NameTaken(SECRETS, name)
        before = access_of(raw) if raw else None
        access = await access_for(etcd.users, namespace, job.metadata.uid, before, etcd.ca)
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

    async def _find_or_create(self, job: ElasticJob, kind: Kind, name: str, wanted: Json) -> Json:
        namespace = job.metadata.namespace
        found = await self._get(kind, namespace, name)
        if found is None:
            try:
                return await self._kube.create(kind, namespace, wanted)
            except AlreadyExists as error:
                raise Retry(str(error)) from error
        if not children.is_owned(job, found):
            raise NameTaken(kind, name)
        return found

    async def _get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        try:
            return await self._kube.get(kind, namespace, name)
        except NotFound:
            return None


def _preconditions(raw: Json) -> Json:
    metadata = raw["metadata"]
    return {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
