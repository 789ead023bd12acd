"""Audit of etcd's users: access that neither root nor the user of a job accounts for.

A client that reached etcd while authentication was off could leave itself a user, or a grant of the
role root, for later. The operator keeps no list of the users that it created: names and key ranges
alone decide, so that an operator that has just started finds the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from elasticjob_operator.etcd_tls.job_users import (
    owner_of_range,
    role_name,
    uid_of_role,
    uid_of_user,
)
from elasticjob_rendezvous.etcd.users import ROOT, Users


class AccessKind(StrEnum):
    """Kind of unknown access."""

    USER = "user"
    ROLE = "role"
    GRANT = "grant"
    RANGE = "range"


@dataclass(frozen=True, slots=True)
class UnknownAccess:
    """Unknown access. `name` is the user or role; a grant has its `role`, a range both its ends."""

    kind: AccessKind
    name: str
    role: str = ""
    range: tuple[bytes, bytes] = (b"", b"")

    def __str__(self) -> str:
        match self.kind:
            case AccessKind.USER | AccessKind.ROLE:
                return f"{self.kind} {self.name!r}"
            case AccessKind.GRANT:
                return f"role {self.role!r} of user {self.name!r}"
            case AccessKind.RANGE:
                return f"keys {self.range[0]!r} to {self.range[1]!r} of role {self.name!r}"
        assert_never(self.kind)


async def unknown_access(users: Users, known: frozenset[str]) -> tuple[UnknownAccess, ...]:
    """Return all unknown access, users first. `known`: users and roles of etcd's administrator.

    Raises `EtcdError`.
    """
    return tuple([found async for found in _unknown_access(users, known)])


async def _unknown_access(users: Users, known: frozenset[str]) -> AsyncIterator[UnknownAccess]:
    for user in await users.users():
        if user == ROOT or user in known:
            continue
        uid = uid_of_user(user)
        if uid is None:
            yield UnknownAccess(AccessKind.USER, user)
            continue
        for role in await users.roles_of(user):
            if role != role_name(uid):
                yield UnknownAccess(AccessKind.GRANT, user, role)
    for role in await users.roles():
        if role == ROOT or role in known:
            continue
        uid = uid_of_role(role)
        if uid is None:
            yield UnknownAccess(AccessKind.ROLE, role)
            continue
        for keys in await users.ranges_of(role):
            if owner_of_range(*keys) != uid:
                yield UnknownAccess(AccessKind.RANGE, role, range=keys)


def is_removable(found: UnknownAccess, exclusive: bool) -> bool:
    """Return True if the operator may remove it: names of jobs are the operator's in every etcd,
    others only in one that nobody else administers."""
    return exclusive or found.kind in (AccessKind.GRANT, AccessKind.RANGE)


async def remove(users: Users, found: UnknownAccess) -> None:
    """Remove unknown access. Idempotent. Raises `EtcdError`."""
    match found.kind:
        case AccessKind.USER:
            await users.delete_user(found.name)
        case AccessKind.ROLE:
            await users.delete_role(found.name)
        case AccessKind.GRANT:
            await users.revoke(found.name, found.role)
        case AccessKind.RANGE:
            await users.revoke_range(found.name, *found.range)
        case _:
            assert_never(found.kind)
