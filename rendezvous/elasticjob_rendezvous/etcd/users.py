"""Administration of etcd's users and roles.

Each request is declarative: it reads first and writes only the difference, because every write
makes the pending requests of all users fail once. A request may therefore be repeated at any
time and by several administrators at once, and a new read resolves a write of unknown outcome.

Source of the semantics: the etcd v3 Auth API. An etcd without authentication stores users too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from pyetcd.etcdrpc import auth_pb2, rpc_pb2

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    InvalidConfiguration,
    InvalidRequest,
    Unauthenticated,
)
from elasticjob_rendezvous.etcd.wire import interval

ROOT = "root"
"""Name of the user and of the role to which etcd itself grants all permissions."""

_ATTEMPTS = 5
_ABSENT = ("user name not found", "role name not found", "permission is not granted to the role")
_EXISTS = ("user name already exists", "role name already exists")
_NOT_ENABLED = "authentication is not enabled"

_Permission = tuple[int, bytes, bytes]
"""Kind, key and range end, in etcd's representation."""


class Absent(InvalidRequest):
    """Missing user or role."""

    remedy = "create the user or role first"


class Exists(InvalidRequest):
    """User or role that another administrator has just created."""

    remedy = "read it and correct it"


class Users:
    """Administrator of users and roles; with authentication, the client's user must be root."""

    def __init__(self, client: Client) -> None:
        self._transport = client.transport
        # Cache of accepted passwords: by design, a check costs etcd tens of milliseconds of CPU.
        self._accepted: dict[str, str] = {}

    async def enable_auth(self, root_password: str | None = None) -> None:
        """Enable authentication; do nothing if it is already enabled.

        Creates root with the password of our own client. Any other password would lock the client
        out, and raises `InvalidConfiguration`. Raises `Unauthenticated` if root already has
        another password.
        """
        token = self._transport.token
        password = token.password if root_password is None else root_password
        if token.user != ROOT or not password or token.password != password:
            problem = f"the client must be {ROOT!r} with this password, or it locks itself out"
            raise InvalidConfiguration("enabling of auth", repr(token.user), problem)
        if await self._accepts(ROOT, password):
            return
        await self.put_user(ROOT, password)
        await self._settle(self._role_adder(ROOT))
        await self.grant(ROOT, ROOT)
        await self._settle(
            lambda: self._write("enabling of auth", "AuthEnable", rpc_pb2.AuthEnableRequest())
        )

    async def has_user(self, name: str) -> bool:
        """Return True if the user exists."""
        return await self._roles_of(name) is not None

    async def has_role(self, name: str) -> bool:
        """Return True if the role exists."""
        return await self._permissions_of(name) is not None

    async def put_user(self, name: str, password: str, *, check: bool = False) -> None:
        """Create the user if it is missing, and set its password.

        `check` has etcd check a password that it accepted before.
        """
        if check:
            self._accepted.pop(name, None)

        async def attempt() -> None:
            if await self._roles_of(name) is None:
                request = rpc_pb2.AuthUserAddRequest(name=name, password=password)
                await self._write(f"adding of user {name!r}", "UserAdd", request)
            elif self._accepted.get(name) != password and not await self._accepts(name, password):
                change = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=password)
                write = f"change of the password of user {name!r}"
                await self._write(write, "UserChangePassword", change)

        await self._settle(attempt)
        self._accepted[name] = password

    async def put_role(self, name: str, prefix: str) -> None:
        """Create the role if it is missing, and limit it to read and write below `prefix`."""
        if not prefix.endswith("/"):
            raise ValueError(f"the key prefix must end with '/': {prefix!r}")
        wanted: _Permission = (auth_pb2.Permission.READWRITE, *interval(prefix, True))

        async def attempt() -> None:
            held = await self._permissions_of(name)
            if held is None:
                await self._role_adder(name)()
                held = ()
            for _, key, end in (extra for extra in held if extra[1:] != wanted[1:]):
                revoke = rpc_pb2.AuthRoleRevokePermissionRequest(role=name, key=key, range_end=end)
                with suppress(Absent):
                    await self._write(f"narrowing of role {name!r}", "RoleRevokePermission", revoke)
            if wanted not in held:
                kind, key, end = wanted
                permission = auth_pb2.Permission(permType=kind, key=key, range_end=end)
                grant = rpc_pb2.AuthRoleGrantPermissionRequest(name=name, perm=permission)
                await self._write(f"permission for role {name!r}", "RoleGrantPermission", grant)

        await self._settle(attempt)

    async def grant(self, user: str, role: str) -> None:
        """Grant the role to the user. Raises `Absent` if either does not exist."""

        async def attempt() -> None:
            if role not in (await self._roles_of(user) or ()):
                request = rpc_pb2.AuthUserGrantRoleRequest(user=user, role=role)
                await self._write(f"grant of {role!r} to {user!r}", "UserGrantRole", request)

        await self._settle(attempt)

    async def delete_user(self, name: str) -> None:
        """Delete the user; its tokens become invalid at once."""
        self._accepted.pop(name, None)
        request = rpc_pb2.AuthUserDeleteRequest(name=name)
        with suppress(Absent):
            await self._settle(
                lambda: self._write(f"deletion of user {name!r}", "UserDelete", request)
            )

    async def delete_role(self, name: str) -> None:
        """Delete the role and revoke it from all users."""
        request = rpc_pb2.AuthRoleDeleteRequest(role=name)
        with suppress(Absent):
            await self._settle(
                lambda: self._write(f"deletion of role {name!r}", "RoleDelete", request)
            )

    async def users(self) -> tuple[str, ...]:
        """Return the names of all users."""
        request = rpc_pb2.AuthUserListRequest()
        return tuple((await self._read("list of users", "UserList", request)).users)

    async def roles(self) -> tuple[str, ...]:
        """Return the names of all roles."""
        request = rpc_pb2.AuthRoleListRequest()
        return tuple((await self._read("list of roles", "RoleList", request)).roles)

    async def roles_of(self, user: str) -> tuple[str, ...]:
        """Return the roles granted to a user; empty if there is no such user."""
        return await self._roles_of(user) or ()

    async def ranges_of(self, role: str) -> tuple[tuple[bytes, bytes], ...]:
        """Return the key ranges, each with its end, that a role permits; empty without it."""
        return tuple(held[1:] for held in await self._permissions_of(role) or ())

    async def revoke(self, user: str, role: str) -> None:
        """Revoke the role from the user. A user without it is not an error."""

        async def attempt() -> None:
            if role in await self.roles_of(user):
                request = rpc_pb2.AuthUserRevokeRoleRequest(name=user, role=role)
                await self._write(
                    f"revocation of {role!r} from {user!r}", "UserRevokeRole", request
                )

        await self._settle(attempt)

    async def revoke_range(self, role: str, key: bytes, end: bytes) -> None:
        """Remove a key range from a role. A role without it is not an error."""
        request = rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=end)
        with suppress(Absent):
            await self._settle(
                lambda: self._write(f"narrowing of role {role!r}", "RoleRevokePermission", request)
            )

    async def _roles_of(self, user: str) -> tuple[str, ...] | None:
        request = rpc_pb2.AuthUserGetRequest(name=user)
        with suppress(Absent):
            return tuple((await self._read(f"user {user!r}", "UserGet", request)).roles)
        return None

    async def _permissions_of(self, role: str) -> tuple[_Permission, ...] | None:
        request = rpc_pb2.AuthRoleGetRequest(role=role)
        with suppress(Absent):
            reply = await self._read(f"role {role!r}", "RoleGet", request)
            return tuple((held.permType, held.key, held.range_end) for held in reply.perm)
        return None

    async def _accepts(self, user: str, password: str) -> bool:
        """Return True if authentication is enabled and the password is correct."""
        request = rpc_pb2.AuthenticateRequest(name=user, password=password)
        try:
            await self._read(f"check of the password of {user!r}", "Authenticate", request)
        except Unauthenticated:
            return False
        except InvalidRequest as error:
            if _NOT_ENABLED not in error.detail:
                raise
            return False
        return True

    def _role_adder(self, name: str) -> Callable[[], Awaitable[None]]:
        async def add() -> None:
            with suppress(Exists):
                request = rpc_pb2.AuthRoleAddRequest(name=name)
                await self._write(f"adding of role {name!r}", "RoleAdd", request)

        return add

    async def _settle(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat an attempt until its outcome is known; each attempt must read before it writes."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(Ambiguous, Exists):
                return await attempt()
        return await attempt()

    async def _read(self, operation: str, method: str, request: Any) -> Any:
        return await self._send(operation, method, request, repeatable=True)

    async def _write(self, operation: str, method: str, request: Any) -> None:
        await self._send(operation, method, request, repeatable=False)

    async def _send(self, operation: str, method: str, request: Any, *, repeatable: bool) -> Any:
        try:
            return await self._transport.call(
                operation,
                lambda link, metadata, timeout: getattr(link.auth, method)(
                    request, metadata=metadata, timeout=timeout
                ),
                repeatable=repeatable,
            )
        except InvalidRequest as error:
            for kind, phrases in ((Absent, _ABSENT), (Exists, _EXISTS)):
                if error.detail.endswith(phrases):
                    raise kind(operation, error.endpoint, error.detail) from error
            raise
