"""Who may do what in etcd for one job: its user, the role that holds its keys, and their end.

The job's Secret is the truth about its password: etcd is made to accept what the Secret holds.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from elasticjob_operator.core.access import Access
from elasticjob_rendezvous.core.keys import job_folder
from elasticjob_rendezvous.core.kv import Delete, Txn
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous
from elasticjob_rendezvous.etcd.users import Users

SECRET_BYTES = 32
_USER_PREFIX = "job-"
_ATTEMPTS = 5


def user_name(uid: str) -> str:
    """The etcd user of a job, and the role of that user."""
    return _USER_PREFIX + uid


def uid_of_user(name: str) -> str | None:
    """The job whose user or role this is; None for one that is no job's."""
    return name.removeprefix(_USER_PREFIX) if name.startswith(_USER_PREFIX) else None


async def access_for(
    users: Users | None, namespace: str, uid: str, existing: Access | None, ca: bytes | None
) -> Access:
    """What the job's Secret shall hold; etcd has its user and role when this returns.

    Keys and passwords are made once and kept as long as `existing`, what the Secret holds now, has
    them. May be called again at any time: what was lost in etcd is put right. An etcd that has no
    role for the job is new, perhaps, or lost its data: it is then made to let nobody in without a
    user.

    Args:
        users: of an etcd where each job has a user of its own; None where none is managed.
        ca: the authorities that etcd's certificate is signed by, as they are now.

    Raises:
        EtcdError: etcd is not as the result says; call again.
    """
    access = existing or Access(_random().encode(), None, None, None)
    access = replace(access, ca=ca)
    if users is None:
        return access
    name = user_name(uid)
    if access.user != name or not access.password:
        access = replace(access, user=name, password=_random())
    assert access.password, "it was made above"
    if not await users.has_role(name):
        await users.enable_auth()
    await users.put_role(name, job_folder(namespace, uid))
    await users.put_user(name, access.password)
    await users.grant(name, name)
    return access


async def forget_job(client: Client, users: Users | None, namespace: str, uid: str) -> None:
    """Remove what etcd holds of a job that is gone: its user first, so that nobody writes again."""
    if users is not None:
        await forget_user(users, uid)
    removal = Txn((), (Delete(job_folder(namespace, uid), prefix=True),))
    for _ in range(_ATTEMPTS - 1):
        try:
            await client.txn(removal)
        except Ambiguous:
            continue  # to remove once more does no harm
        return
    await client.txn(removal)


async def forget_user(users: Users, uid: str) -> None:
    """Remove the user of a job that is gone, and its role."""
    await users.delete_user(user_name(uid))
    await users.delete_role(user_name(uid))


async def uids_with_users(users: Users) -> frozenset[str]:
    """The jobs that have a user or a role here.

    To find those that are gone, ask this first and for the jobs afterwards: a job of which the
    answer does not know yet then keeps what it has just been given.
    """
    names = (*await users.users(), *await users.roles())
    return frozenset(uid for name in names if (uid := uid_of_user(name)))


def _random() -> str:
    """At least 128 bits, as text that survives every file and environment."""
    return secrets.token_urlsafe(SECRET_BYTES)
