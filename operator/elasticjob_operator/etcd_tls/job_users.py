"""Access control of one job in etcd: its user, its role over its keys, and their removal.

The job's Secret is authoritative for the password: etcd is updated to match it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import secret_name
from elasticjob_operator.domain.manifests.owned_objects import (
    Access,
    access_in,
    author_access,
    is_owned,
    secret_data,
)
from elasticjob_operator.domain.plan.user_rotation import secret_annotations
from elasticjob_operator.kubernetes.errors import NotFound
from elasticjob_operator.kubernetes.kinds import SECRETS, Json, Kind
from elasticjob_operator.model import ElasticJob
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous
from elasticjob_rendezvous.etcd.users import Users
from elasticjob_rendezvous.etcd.wire import interval
from elasticjob_rendezvous.protocol.kv import Delete, Txn
from elasticjob_rendezvous.protocol.records.keys import job_folder

SECRET_BYTES = 32
_USER_PREFIX = "job-"
_USER = re.compile(rf"{_USER_PREFIX}(?P<uid>[^./]+)(?:\.(?P<number>[1-9][0-9]{{0,8}}))?")
_ATTEMPTS = 5
_OWN_FOLDER = re.compile(job_folder("(?P<namespace>[^/]+)", "(?P<uid>[^/]+)"))


def role_name(uid: str) -> str:
    """Return the name of the role of a job's etcd users."""
    return _USER_PREFIX + uid


def user_name(uid: str, number: int = 0) -> str:
    """Return the name of a job's etcd user after this number of rotations."""
    return role_name(uid) + (f".{number}" if number else "")


def uid_of_user(name: str) -> str | None:
    """Return the uid of the job that owns this user; None if it is not a job's."""
    found = _USER.fullmatch(name)
    return found["uid"] if found else None


def uid_of_role(name: str) -> str | None:
    """Return the uid of the job that owns this role; None if it is not a job's."""
    uid = uid_of_user(name)
    return uid if uid is not None and name == role_name(uid) else None


def rotations(name: str | None) -> int:
    """Return the number of rotations up to this user; 0 if it is not a job's."""
    found = _USER.fullmatch(name or "")
    return int(found["number"] or 0) if found else 0


def renewed_access(access: Access, uid: str) -> Access:
    """Return this content of the Secret with the job's next user and a new password."""
    name = user_name(uid, rotations(access.user) + 1)
    return replace(access, user=name, password=_random())


async def access_for(
    users: Users | None,
    namespace: str,
    uid: str,
    existing: Access | None,
    ca: bytes | None,
    certificate: tuple[bytes, bytes] | None = None,
    *,
    rotate: bool = False,
) -> Access:
    """Create the job's user and role in etcd; return the content for its Secret.

    Keys and passwords are generated once and kept while `existing`, the Secret's present content,
    has them. Idempotent: data lost in etcd is restored. An etcd without the job's role may be new
    or have lost its data, so authentication is enabled there first.

    Args:
        users: users of an etcd with one user per job; None if users are not managed.
        ca: the current authorities of etcd's certificate.
        certificate: the current client certificate of all agents, and its key; None for none.
        rotate: True to create another user, with a new password, beside the present one.

    Raises:
        EtcdError: etcd may not match the result; call again.
    """
    access = existing or Access(_random().encode(), None, None, None)
    cert, key = certificate or (None, None)
    access = replace(access, ca=ca, cert=cert, key=key)
    if users is None:
        return access
    if not access.user or uid_of_user(access.user) != uid or not access.password:
        access = replace(access, user=user_name(uid), password=_random())
    elif rotate:
        access = renewed_access(access, uid)
    assert access.user, "it was made above"
    assert access.password, "it was made above"
    role = role_name(uid)
    if not await users.has_role(role):
        await users.enable_auth()
    await users.put_role(role, job_folder(namespace, uid))
    await users.put_user(access.user, access.password)
    await users.grant(access.user, role)
    return access


async def remove_old_users(users: Users, uid: str, access: Access) -> tuple[str, ...]:
    """Remove the previous and the next user of a job, beside that in its Secret; return the names.

    The next one exists if a rotation did not reach the Secret. They are looked up by name, every
    few minutes for each job, since a list has the users of all jobs. Before the removal etcd
    checks the password in the Secret, which is set again if it is not accepted: another operator
    replica may have set another one in the same rotation. Raises `EtcdError`.
    """
    number = rotations(access.user)
    names = [user_name(uid, other) for other in (number - 1, number + 1) if other >= 0]
    former = tuple([name for name in names if await users.has_user(name)])
    if not former or not access.user or not access.password:
        return ()
    await users.put_user(access.user, access.password, check=True)
    for name in former:
        await users.delete_user(name)
    return former


async def _users_of(users: Users, uid: str) -> tuple[str, ...]:
    prefix = role_name(uid)  # cheaper than the pattern for thousands of other jobs' users
    found = (name for name in await users.users() if name.startswith(prefix))
    return tuple(name for name in found if uid_of_user(name) == uid)


class SecretMissing(NotFound):
    """Secret that a job's author named and that does not exist."""

    def __init__(self, namespace: str, name: str) -> None:
        super().__init__(
            "spec.rendezvous.secretName", f"there must be a Secret {name} in {namespace}"
        )


async def access_of_author(
    read: Callable[[Kind, str, str], Awaitable[Json]], job: ElasticJob, access: Access
) -> Access:
    """Return the content of the Secret that the job's author named, with the job's own key.

    For a job without secretName, return `access`. `read` reads a Kubernetes object.

    Raises:
        SecretMissing: there is no Secret of this name.
        KubeError: the Secret cannot be read.
    """
    given = job.spec.rendezvous.secret_name
    if not given:
        return access
    namespace = job.metadata.namespace
    try:
        raw = await read(SECRETS, namespace, given)
    except NotFound as error:
        raise SecretMissing(namespace, given) from error
    return author_access(raw, access.job_key)


class SecretWriter(Protocol):
    """Part of the Kubernetes client that renews a Secret. The calls may raise `KubeError`."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    async def patch(self, kind: Kind, namespace: str | None, name: str, body: Json) -> Json:
        """Merge `body` into an object."""

    def now(self) -> datetime:
        """Return the UTC time of the API server's clock."""


async def renew_revoked_secret(kube: SecretWriter, job: ElasticJob) -> None:
    """Write another user and password into the Secret of a job whose users were removed.

    The user is created when the job is admitted again. A Secret that is absent or not the job's
    stays as it is. Raises `KubeError`.
    """
    name, namespace = secret_name(job), job.metadata.namespace
    try:
        raw = await kube.get(SECRETS, namespace, name)
    except NotFound:
        return
    access = access_in(raw)
    if access is None or not is_owned(job, raw):
        return
    metadata = {
        "uid": raw["metadata"]["uid"],
        "resourceVersion": raw["metadata"]["resourceVersion"],
        "annotations": dict(secret_annotations(job, kube.now())),
    }
    data = secret_data(renewed_access(access, job.metadata.uid))
    await kube.patch(SECRETS, namespace, name, {"metadata": metadata, "data": data})


async def remove_job(client: Client, users: Users | None, namespace: str, uid: str) -> None:
    """Remove a deleted job's data from etcd: its users first, so that no further write succeeds."""
    if users is not None:
        await remove_users(users, uid)
    removal = Txn((), (Delete(job_folder(namespace, uid), prefix=True),))
    for _ in range(_ATTEMPTS - 1):
        try:
            await client.txn(removal)
        except Ambiguous:
            continue  # the removal is idempotent
        return
    await client.txn(removal)


async def remove_users(users: Users, uid: str) -> None:
    """Remove a job's users and its role."""
    for name in await _users_of(users, uid):
        await users.delete_user(name)
    await users.delete_role(role_name(uid))


async def namespace_of_user(users: Users, uid: str) -> str:
    """Return the namespace of the job that owns this role; empty if no role names it."""
    for key, end in await users.ranges_of(role_name(uid)):
        if owner_of_range(key, end) == uid:
            return key.decode().split("/")[-3]
    return ""


def owner_of_range(key: bytes, end: bytes) -> str:
    """Return the uid of the job whose keys are exactly this range; empty if no job's are."""
    found = _OWN_FOLDER.fullmatch(key.decode(errors="replace"))
    return found["uid"] if found and interval(found[0], True) == (key, end) else ""


async def uids_with_users(users: Users) -> frozenset[str]:
    """Return the uids of jobs that have a user or a role here.

    To find deleted jobs, call this before listing the jobs: a user created after this call then
    never counts as left over.
    """
    names = (*await users.users(), *await users.roles())
    return frozenset(uid for name in names if (uid := uid_of_user(name)))


def _random() -> str:
    """Return at least 128 random bits as text that is safe in files and environment variables."""
    return secrets.token_urlsafe(SECRET_BYTES)
