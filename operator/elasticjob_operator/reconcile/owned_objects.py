"""Service, Secret, NetworkPolicy and budget of a job: created when absent, never adopted.

They are read by name only, so the operator needs no permission to list Secrets. The results are
cached with the job and refreshed periodically.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from elasticjob_operator.domain.json_object import merge_patch
from elasticjob_operator.domain.manifests import owned_objects
from elasticjob_operator.domain.manifests.names import (
    budget_name,
    network_policy_name,
    secret_name,
    service_name,
)
from elasticjob_operator.domain.manifests.owned_objects import (
    Access,
    PolicyPeer,
    access_in,
    secret_data,
)
from elasticjob_operator.domain.plan.sizes import min_available
from elasticjob_operator.domain.plan.user_rotation import (
    CredentialsState,
    RotationReason,
    due_rotation,
    may_remove_former_users,
    requested_rotation,
    secret_annotations,
)
from elasticjob_operator.domain.status.events import Event, credentials_rotated
from elasticjob_operator.etcd_tls.job_users import rotations
from elasticjob_operator.kubernetes.client import (
    BUDGETS,
    NETWORK_POLICIES,
    SECRETS,
    SERVICES,
    AlreadyExists,
    Forbidden,
    Json,
    Kind,
    Kube,
    NotFound,
    QuotaExceeded,
)
from elasticjob_operator.kubernetes.event_recorder import Subject
from elasticjob_operator.logs import of_job
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import NameTaken, OwnerRemoved
from elasticjob_operator.reconcile.job_memory import RECHECK_SECONDS, JobMemory
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.sources import RendezvousSource

log = logging.getLogger(__name__)

PREDECESSOR_SECONDS = 60.0
"""Maximum wait for the objects of a deleted job of the same name before `NameTaken` is raised."""

NEEDED_RECHECK_SECONDS = 10.0
"""Cache lifetime when pods are about to be created, which would wait for missing objects."""


class NotServed(Forbidden):
    """Namespace to which the operator has no access."""

    def __init__(self, namespace: str, selector: str) -> None:
        remedy = (
            f"label it {selector}; kube-system and the operator's own namespace are never served"
            if selector
            else "run the job in another namespace, or list this one in the chart's watchNamespaces"
        )
        super().__init__(
            f"namespace {namespace} is not served", f"the operator has no access to it; {remedy}"
        )


def forget_access(memory: JobMemory) -> None:
    """Have a job's Secret, and its user in etcd, ensured again before its next pod."""
    memory.owned = replace(memory.owned, access=None)


def note_revoked(memory: JobMemory) -> None:
    """Record that the finished job's user in etcd was removed."""
    memory.owned = replace(memory.owned, revoked=True)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Settings of the rotation of the jobs' etcd users.

    Args:
        maximum_age: maximum age of a user; zero for no rotation by age.
        now: UTC time.
        record: posts events, asynchronously.
    """

    maximum_age: timedelta
    now: Callable[[], datetime]
    record: Callable[[Subject, Iterable[Event]], None]


class OwnedObjects:
    """Manager of the owned objects of all jobs. `clock` is monotonic.

    `operator` may request the status of agents; None: jobs get no NetworkPolicy. `selector` has the
    labels of served namespaces; empty: none are needed.
    """

    def __init__(
        self,
        kube: Kube,
        clock: Callable[[], float],
        credentials: Credentials,
        operator: PolicyPeer | None = None,
        selector: str = "",
    ) -> None:
        self._credentials = credentials
        self._selector = selector
        self._kube = kube
        self._clock = clock
        self._operator = operator

    async def ensure(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        *,
        needed: bool,
        renew: bool,
    ) -> None:
        """Ensure Service, NetworkPolicy and Secret are current, if `needed` or due for a recheck.

        `renew` also recreates the job's user in etcd.

        Raises:
            NameTaken: an object that is not the job's has the name.
            NotServed: the operator has no access to the namespace.
        """
        try:
            await self._ensure(job, memory, source, needed, renew)
        except QuotaExceeded:
            raise
        except Forbidden as error:
            if await self._is_served(job):
                raise
            raise NotServed(job.metadata.namespace, self._selector) from error

    async def _is_served(self, job: ElasticJob) -> bool:
        """Return False if the operator may not even read a Service: no policy refuses reads."""
        try:
            await self._get(SERVICES, job.metadata.namespace, service_name(job))
        except Forbidden:
            return False
        return True

    async def _ensure(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        needed: bool,
        renew: bool,
    ) -> None:
        access, age = memory.owned.access, self._clock() - memory.owned.checked_at
        due = source.manages_users and requested_rotation(job) != memory.owned.request
        if access is None:
            due = due or needed or source.needs_access
        else:
            due = due or source.is_stale(access)
            # Check existence only: a full check costs etcd more.
            if needed and age > NEEDED_RECHECK_SECONDS:
                due = due or await self._is_gone(job)
        if due or renew or age > RECHECK_SECONDS:
            await self._find_or_create(job, memory, SERVICES, owned_objects.service(job))
            if self._operator is not None:
                await self._ensure_network_policy(job, memory, self._operator)
            access = await self._ensure_access(job, memory, source)
            memory.owned = replace(
                memory.owned,
                access=access,
                checked_at=self._clock(),
                request=requested_rotation(job),
            )

    async def _is_gone(self, job: ElasticJob) -> bool:
        """Return True if the Secret, the Service or the NetworkPolicy was deleted."""
        namespace = job.metadata.namespace
        needed = [(SECRETS, secret_name(job)), (SERVICES, service_name(job))]
        if self._operator is not None:
            needed.append((NETWORK_POLICIES, network_policy_name(job)))
        for kind, name in needed:
            if await self._get(kind, namespace, name) is None:
                return True
        return False

    async def ensure_budget(self, job: ElasticJob, memory: JobMemory, ready: int) -> None:
        """Create or update the budget, or drop it if the job wants none. Raises `NameTaken`."""
        least = min_available(job, ready)
        if least is None:
            await self.drop_budget(job, memory)
            return
        if memory.owned.min_available == least and not self._is_old(memory):
            return
        name, namespace = budget_name(job), job.metadata.namespace
        wanted = owned_objects.budget(job, least)
        found = await self._find_or_create(job, memory, BUDGETS, wanted)
        changed = {
            key: value for key, value in wanted["spec"].items() if found["spec"].get(key) != value
        }
        if "maxUnavailable" in found["spec"]:  # a user's; the API server admits one of the two
            changed["maxUnavailable"] = None
        if changed:
            patch = {"metadata": _preconditions(found), "spec": changed}
            await self._kube.patch(BUDGETS, namespace, name, patch)
        self._keep_budget(memory, least)

    async def drop_budget(self, job: ElasticJob, memory: JobMemory) -> None:
        """Delete the job's budget, if any: all of its pods may be evicted."""
        if memory.owned.min_available is None and not self._is_old(memory):
            return
        name, namespace = budget_name(job), job.metadata.namespace
        found = await self._get(BUDGETS, namespace, name)
        if found is not None and owned_objects.is_owned(job, found):
            await self._kube.delete(BUDGETS, namespace, name, uid=found["metadata"]["uid"])
        self._keep_budget(memory, None)

    def _keep_budget(self, memory: JobMemory, least: int | None) -> None:
        memory.owned = replace(memory.owned, min_available=least, budget_checked_at=self._clock())

    def _is_old(self, memory: JobMemory) -> bool:
        return self._clock() - memory.owned.budget_checked_at > RECHECK_SECONDS

    async def _ensure_network_policy(
        self, job: ElasticJob, memory: JobMemory, operator: PolicyPeer
    ) -> None:
        """Create the job's NetworkPolicy, or correct its spec. Raises `NameTaken`."""
        wanted = owned_objects.network_policy(job, operator)
        found = await self._find_or_create(job, memory, NETWORK_POLICIES, wanted)
        changed = merge_patch(found["spec"], wanted["spec"])
        if changed:
            name, namespace = network_policy_name(job), job.metadata.namespace
            patch = {"metadata": _preconditions(found), "spec": changed}
            await self._kube.patch(NETWORK_POLICIES, namespace, name, patch)

    async def _ensure_access(
        self, job: ElasticJob, memory: JobMemory, source: RendezvousSource
    ) -> Access:
        """Create the job's Secret, or update it to the access that the source grants now."""
        namespace, name = job.metadata.namespace, secret_name(job)
        raw = None if _is_new(job) else await self._get(SECRETS, namespace, name)
        if raw is not None:
            self._check_owner(job, memory, SECRETS, raw)
        before = access_in(raw) if raw else None
        reason = None
        if raw is not None and before is not None and source.manages_users:
            reason = await self._due_rotation(job, memory, source, raw, before)
        # After loss of the Secret, new agents must share the key that running agents still hold.
        known = before or memory.owned.access
        access = await source.access(job, known, rotate=reason is not None)
        now = self._credentials.now()
        if raw is None:
            body = owned_objects.secret(job, access, secret_annotations(job, now))
            try:
                made = await self._kube.create(SECRETS, namespace, body)
            except AlreadyExists as error:
                raise Retry(str(error)) from error
            self._check_owner(job, memory, SECRETS, made)
        elif access != before:
            metadata = _preconditions(raw)
            if before is None or access.user != before.user:
                metadata["annotations"] = dict(secret_annotations(job, now))
            patch = {"metadata": metadata, "data": secret_data(access)}
            await self._kube.patch(SECRETS, namespace, name, patch)
        if reason is not None:
            event = credentials_rotated(reason, access.user or "")
            self._credentials.record(Subject.of_job(job), (event,))
            log.info("rotated the credentials: %s", reason, extra=of_job(memory.key))
        return access

    async def _due_rotation(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        raw: Json,
        before: Access,
    ) -> RotationReason | None:
        """Return the reason of the rotation that is due; remove former users whose time is over."""
        now = self._credentials.now()
        state = CredentialsState.of(raw, now)
        if may_remove_former_users(state, now):
            for name in await source.remove_former_users(before):
                log.info("removed etcd's former user %s", name, extra=of_job(memory.key))
        rotated = rotations(before.user) > 0
        return due_rotation(job, state, self._credentials.maximum_age, now, rotated)

    async def _find_or_create(
        self, job: ElasticJob, memory: JobMemory, kind: Kind, wanted: Json
    ) -> Json:
        """Return the object of this kind and name, created if absent. Raises `NameTaken`."""
        namespace, name = job.metadata.namespace, wanted["metadata"]["name"]
        found = None if _is_new(job) else await self._get(kind, namespace, name)
        if found is None:
            try:
                found = await self._kube.create(kind, namespace, wanted)
            except AlreadyExists:
                found = await self._kube.get(kind, namespace, name)
        self._check_owner(job, memory, kind, found)
        return found

    def _check_owner(self, job: ElasticJob, memory: JobMemory, kind: Kind, found: Json) -> None:
        """Raise `NameTaken` for an object of another owner; wait for one of a deleted job."""
        if owned_objects.is_owned(job, found):
            return
        name = found["metadata"]["name"]
        if owned_objects.has_lost_owner(job, found):
            raise OwnerRemoved(kind, name)
        waited = self._clock() - memory.seen_at
        if owned_objects.is_of_predecessor(job, found) and waited < PREDECESSOR_SECONDS:
            raise Retry(f"{kind.plural} {name} of the deleted job of this name is still there")
        raise NameTaken(kind, name)

    async def _get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        try:
            return await self._kube.get(kind, namespace, name)
        except NotFound:
            return None


def _is_new(job: ElasticJob) -> bool:
    """Return True if no objects were created for the job yet, so lookups can be skipped."""
    return job.status.phase is None


def _preconditions(raw: Json) -> Json:
    metadata = raw["metadata"]
    return {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
