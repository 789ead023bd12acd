"""The users and roles of an etcd, as its administrator keeps them.

Each request makes something so: it reads first and writes what is missing, because every write
here makes requests of all users, if they are in flight, fail once. So it may be made again at any
time, by several at once, and a write of unknown outcome is settled by reading again.

Source of the semantics: the etcd v3 Auth API. An etcd that is not yet guarded keeps users too.
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
"""The user, and the role, whose name etcd itself knows: it may do everything."""

_ATTEMPTS = 5
_ABSENT = ("user name not found", "role name not found", "permission is not granted to the role")
_EXISTS = ("user name already exists", "role name already exists")
_NOT_ENABLED = "authentication is not enabled"

_Permission = tuple[int, bytes, bytes]
"""Kind, key and range end, as etcd keeps them."""


class Absent(InvalidRequest):
    """There is no such user or role."""

    remedy = "make the user or role first"


class Exists(InvalidRequest):
    """Another administrator has just made this user or role."""

    remedy = "read it and make it what it should be"


class Users:
    """Administers through `client`, whose user must be root where authentication is enabled."""

    def __init__(self, client: Client) -> None:
        self._transport = client.transport
        # To check a password costs etcd tens of milliseconds of a core, on purpose.
        self._accepted: dict[str, str] = {}

    async def enable_auth(self, root_password: str | None = None) -> None:
        """Let nobody in without a user from now on. Does nothing where that is so.

        Makes root, with the password of our own client: with another's it would lock itself out,
        and `InvalidConfiguration` is raised. Raises `Unauthenticated` when root has another
        password already.
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

    async def has_role(self, name: str) -> bool:
        """Whether there is such a role."""
        return await self._permissions_of(name) is not None

    async def put_user(self, name: str, password: str) -> None:
        """Make this user if there is none, and its password this one."""

        async def attempt() -> None:
            if await self._roles_of(name) is None:
                request = rpc_pb2.AuthUserAddRequest(name=name, password=password)
                await self._write(f"adding of user {name!r}", "UserAdd", request)
            elif self._accepted.get(name) != password and not await self._accepts(name, password):
                change = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=password)
                what = f"change of the password of user {name!r}"
                await self._write(what, "UserChangePassword", change)

        await self._settle(attempt)
        self._accepted[name] = password

    async def put_role(self, name: str, prefix: str) -> None:
        """Make this role one that may read and write all keys below `prefix`, and no other."""
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
        """Give the user this role. Raises `Absent` when there is no such user or role."""

        async def attempt() -> None:
            if role not in (await self._roles_of(user) or ()):
                request = rpc_pb2.AuthUserGrantRoleRequest(user=user, role=role)
                await self._write(f"grant of {role!r} to {user!r}", "UserGrantRole", request)

        await self._settle(attempt)

    async def delete_user(self, name: str) -> None:
        """Delete this user; its tokens are void at once."""
        self._accepted.pop(name, None)
        request = rpc_pb2.AuthUserDeleteRequest(name=name)
        with suppress(Absent):
            await self._settle(
                lambda: self._write(f"deletion of user {name!r}", "UserDelete", request)
            )

    async def delete_role(self, name: str) -> None:
        """Delete this role, and take it from whoever has it."""
        request = rpc_pb2.AuthRoleDeleteRequest(role=name)
        with suppress(Absent):
            await self._settle(
                lambda: self._write(f"deletion of role {name!r}", "RoleDelete", request)
            )

    async def users(self) -> tuple[str, ...]:
        """The names of all users."""
        request = rpc_pb2.AuthUserListRequest()
        return tuple((await self._read("list of users", "UserList", request)).users)

    async def roles(self) -> tuple[str, ...]:
        """The names of all roles."""
        request = rpc_pb2.AuthRoleListRequest()
        return tuple((await self._read("list of roles", "RoleList", request)).roles)

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
        """Whether authentication is enabled and this is the user's password."""
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
        """Attempt until the outcome is known; what is attempted must look before it writes."""
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
