"""Administration of users and roles, and the limits of a role, on real etcd servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    EtcdError,
    InvalidConfiguration,
    PermissionDenied,
    Unauthenticated,
)
from elasticjob_rendezvous.etcd.users import ROOT, Absent, Users
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Is, Put, Range, Target, Txn
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.watches import drained, next_events, opened
from tests.integration.etcd_server import VERSIONS, EtcdServer

ROOT_PASSWORD = "the root password"
GUARDED = VERSIONS[1:]
"""Versions with supported user administration. On 3.4 users see too much of each other."""

CHEAP = ("--bcrypt-cost=4",)
NEWER = tuple(version for version in GUARDED if version != "3.5")


@pytest.fixture(params=GUARDED)
def server(request: pytest.FixtureRequest, start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd(request.param, arguments=CHEAP)


def root_of(server: EtcdServer, password: str = ROOT_PASSWORD) -> Client:
    return Client([server.url], user=ROOT, password=password)


async def make_job(users: Users, name: str) -> None:
    """Make a user with its name as password, with access to all keys below /name/."""
    await users.put_role(name, f"/{name}/")
    await users.put_user(name, name)
    await users.grant(name, name)


def client_of(server: EtcdServer, name: str) -> Client:
    return Client([server.url], user=name, password=name, request_timeout_seconds=2.0)


def auth_status(server: EtcdServer) -> str:
    """Return the state of authentication, and the revision of users and roles."""
    return server.ctl("auth", "status", user=f"{ROOT}:{ROOT_PASSWORD}")


def test_enabling_is_idempotent_and_safe_for_concurrent_callers(server: EtcdServer) -> None:
    async def main() -> None:
        async with (
            root_of(server) as one,
            root_of(server) as other,
            Client([server.url]) as stranger,
            client_of(server, "a") as job,
        ):
            for client in (stranger, job):
                with pytest.raises(InvalidConfiguration, match="locks itself out"):
                    await Users(client).enable_auth()
            with pytest.raises(InvalidConfiguration, match="locks itself out"):
                await Users(one).enable_auth("another password")
            await stranger.put(Put("/k", b""))  # no user is locked out yet

            both = Users(one), Users(other)
            await asyncio.gather(*(users.enable_auth() for users in both))
            with pytest.raises(Unauthenticated):
                await stranger.put(Put("/k", b""))
            await one.put(Put("/k", b""))  # it got a new token
            before = auth_status(server)
            assert "true" in before
            await both[0].enable_auth()
            assert auth_status(server) == before
            await asyncio.to_thread(server.restart)
            await both[1].enable_auth()
            assert auth_status(server) == before

        async with root_of(server, "wrong") as impostor:
            with pytest.raises(Unauthenticated):
                await Users(impostor).enable_auth()

    asyncio.run(main())


def test_existing_settings_are_not_rewritten(server: EtcdServer) -> None:
    async def main() -> None:
        async with root_of(server) as client:
            users = Users(client)
            await users.enable_auth()
            await make_job(users, "a")
            before = auth_status(server)
            await make_job(users, "a")
            await make_job(Users(client), "a")  # as after a restart
            assert auth_status(server) == before

            assert (await users.users(), await users.roles()) == (("a", ROOT), ("a", ROOT))
            for _ in range(2):
                await users.delete_user("a")
                await users.delete_role("a")
            assert (await users.users(), await users.roles()) == ((ROOT,), (ROOT,))
            with pytest.raises(Absent):
                await users.grant("a", ROOT)
            await make_job(users, "a")  # the cached state of the deleted one does not count
            async with client_of(server, "a") as job:
                await job.put(Put("/a/k", b""))

    asyncio.run(main())


def test_password_and_role_are_corrected(server: EtcdServer) -> None:
    async def main() -> None:
        async with root_of(server) as client, client_of(server, "a") as job:
            users = Users(client)
            await users.enable_auth()
            await make_job(users, "a")
            administrator = f"{ROOT}:{ROOT_PASSWORD}"
            for arguments in (("--prefix=true", "readwrite", "/"), ("read", "/b/k")):
                server.ctl("role", "grant-permission", "a", *arguments, user=administrator)
            server.ctl("role", "revoke-permission", "a", "--prefix=true", "/a/", user=administrator)
            await job.put(Put("/b/k", b""))
            await users.put_role("a", "/a/")
            await job.put(Put("/a/k", b""))
            for refused in (job.put(Put("/b/k", b"")), job.range(Range("/b/k"))):
                with pytest.raises(PermissionDenied):
                    await refused

            await Users(client).put_user("a", "another password")
            with pytest.raises(Unauthenticated):
                await job.put(Put("/a/k", b""))
            async with Client([server.url], user="a", password="another password") as again:
                await again.put(Put("/a/k", b""))
            await users.delete_user("a")

    asyncio.run(main())


def test_prefix_without_trailing_slash_is_refused() -> None:
    """A prefix without its slash would cover every job whose id begins with it."""

    async def main() -> None:
        async with Client(["127.0.0.1:1"]) as client:
            for prefix in ("", "/a"):
                with pytest.raises(ValueError, match="must end with '/'"):
                    await Users(client).put_role("a", prefix)

    asyncio.run(main())


@pytest.mark.parametrize("version", NEWER)
def test_write_with_lost_answer_is_settled_by_reading(
    version: str, start_etcd: StartEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on 3.5: for a tenth of a second it may read a user's state before the last change.

    Here root changes often enough for a read as a non-administrator: 3.5 looks past the end of its
    write buffer (`bucketBuffer.Range`), where old records lie.
    """
    server = start_etcd(version, arguments=CHEAP)

    async def main() -> None:
        async with root_of(server) as client:
            lost = lose_first_answers(client, monkeypatch)
            users = Users(client)
            await users.enable_auth()
            await make_job(users, "a")
            async with client_of(server, "a") as job:
                await job.put(Put("/a/k", b""))
            await users.put_user("a", "another password")
            await users.delete_user("a")
            await users.delete_role("a")
            assert (await users.users(), await users.roles()) == ((ROOT,), (ROOT,))
            assert len(lost) == 12, lost

    asyncio.run(main())


def lose_first_answers(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Apply every write, but report the first of each kind as ambiguous."""
    call = client.transport.call
    lost: list[str] = []

    async def lossy(operation: str, send: Any, *, repeatable: bool = True) -> Any:
        reply = await call(operation, send, repeatable=repeatable)
        if not repeatable and operation not in lost:
            lost.append(operation)
            raise Ambiguous(operation, "here", "the answer was lost")
        return reply

    monkeypatch.setattr(client.transport, "call", lossy)
    return lost


def ask(client: Client, service: str, method: str, request: Any) -> Awaitable[Any]:
    """Send a request that the client itself never would; `request` is a message, or its bytes."""
    raw = request if isinstance(request, bytes) else request.SerializeToString()
    return client.transport.call(
        method,
        lambda link, metadata, timeout: link.channel.unary_unary(
            f"/etcdserverpb.{service}/{method}"
        )(raw, metadata=metadata, timeout=timeout),
    )


Trespass = Callable[[Client, int], Awaitable[Any]]
"""Attempt by job b's user, given the lease of job a."""

KEY = "/a/k"
IN_KEYS: dict[str, Trespass] = {
    "read": lambda b, _: b.range(Range(KEY)),
    "list": lambda b, _: b.range(Range("/a/", True)),
    "list all": lambda b, _: b.range(Range("/", True)),
    "list past its own": lambda b, _: ask(
        b, "KV", "Range", rpc_pb2.RangeRequest(key=b"/b/", range_end=b"\0")
    ),
    "count": lambda b, _: ask(
        b, "KV", "Range", rpc_pb2.RangeRequest(key=b"/a/", range_end=b"/a0", count_only=True)
    ),
    "write": lambda b, _: b.put(Put(KEY, b"")),
    "delete": lambda b, _: b.txn(Txn((), (Delete(KEY),))),
    "delete all": lambda b, _: b.txn(Txn((), (Delete("/", True),))),
    "compare": lambda b, _: b.txn(
        Txn((Compare(KEY, Target.MOD, 1, Is.GREATER),), (Put("/b/k", b""),))
    ),
    "read in a transaction that fails": lambda b, _: b.txn(
        Txn((Compare("/b/k", Target.MOD, 10**9),), (Range(KEY),))
    ),
    "watch": lambda b, _: drained(b.watch([Range(KEY)])),
    "watch all": lambda b, _: drained(b.watch([Range("/", True)])),
    "watch beside its own": lambda b, _: drained(b.watch([Range("/b/", True), Range(KEY)])),
}
IN_LEASES: dict[str, Trespass] = {
    "revoke the lease": lambda b, lease: b.revoke(lease),
    "keep the lease": lambda b, lease: b.keep_alive(lease),
    "write with the lease": lambda b, lease: b.put(Put("/b/k", b"", lease)),
    "write with the lease in a transaction": lambda b, lease: b.txn(
        Txn((), (Put("/b/k", b"", lease),))
    ),
    "see the lease's keys": lambda b, lease: ask(
        b, "Lease", "LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
    ),
    "list leases": lambda b, _: ask(b, "Lease", "LeaseLeases", b""),
}
IN_USERS: dict[str, Trespass] = {
    "make a user": lambda b, _: Users(b).put_user("c", "c"),
    "delete a user": lambda b, _: Users(b).delete_user("a"),
    "list users": lambda b, _: Users(b).users(),
    "list roles": lambda b, _: Users(b).roles(),
    "widen its role": lambda b, _: Users(b).put_role("b", "/"),
    "take the other's role": lambda b, _: Users(b).grant("b", "a"),
    "become root": lambda b, _: Users(b).grant("b", ROOT),
    "disable": lambda b, _: ask(b, "Auth", "AuthDisable", rpc_pb2.AuthDisableRequest()),
    "set the other's password": lambda b, _: ask(
        b,
        "Auth",
        "UserChangePassword",
        rpc_pb2.AuthUserChangePasswordRequest(name="a", password="b"),
    ),
    "read the other's role": lambda b, _: ask(
        b, "Auth", "RoleGet", rpc_pb2.AuthRoleGetRequest(role="a")
    ),
}
IN_THE_SERVER: dict[str, Trespass] = {
    "compact": lambda b, _: ask(b, "KV", "Compact", rpc_pb2.CompactionRequest(revision=2)),
    "defragment": lambda b, _: ask(b, "Maintenance", "Defragment", rpc_pb2.DefragmentRequest()),
    "hash": lambda b, _: ask(b, "Maintenance", "HashKV", rpc_pb2.HashKVRequest()),
    "set an alarm": lambda b, _: ask(
        b,
        "Maintenance",
        "Alarm",
        rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, alarm=rpc_pb2.NOSPACE),
    ),
    "add a member": lambda b, _: ask(
        b, "Cluster", "MemberAdd", rpc_pb2.MemberAddRequest(peerURLs=["http://127.0.0.1:1"])
    ),
    "move the leader": lambda b, _: ask(
        b, "Maintenance", "MoveLeader", rpc_pb2.MoveLeaderRequest(targetID=1)
    ),
}
REFUSED = "permission denied"
TRESPASSES = IN_KEYS | IN_LEASES | IN_USERS | IN_THE_SERVER


def test_job_user_can_access_only_its_own_keys(server: EtcdServer) -> None:
    async def main() -> None:
        async with (
            root_of(server) as root,
            client_of(server, "a") as a,
            client_of(server, "b") as b,
        ):
            users = Users(root)
            await users.enable_auth()
            for name in ("a", "b"):
                await make_job(users, name)
            lease = (await a.grant(60)).id
            await a.put(Put(KEY, b"secret", lease))
            before = auth_status(server)
            outcomes = {name: await outcome(act, b, lease) for name, act in TRESPASSES.items()}
            assert outcomes == dict.fromkeys(TRESPASSES, REFUSED)
            assert auth_status(server) == before
            assert (await a.range(Range(KEY))).kvs[0].value == b"secret"
            await works_within(b, "/b/")

    asyncio.run(main())


async def outcome(trespass: Trespass, client: Client, lease: int) -> str:
    try:
        return repr(await trespass(client, lease))
    except EtcdError as error:
        return REFUSED if REFUSED in error.detail else str(error)


async def works_within(client: Client, prefix: str) -> None:
    lease = (await client.grant(30)).id
    async with aclosing(client.watch([Range(prefix, True)])) as watch:
        await opened(watch)
        created = Compare(f"{prefix}own", Target.CREATE, 0)
        assert (await client.txn(Txn((created,), (Put(f"{prefix}own", b"", lease),)))).succeeded
        assert await client.keep_alive(lease) == 30
        assert len((await client.range(Range(prefix, True))).kvs) == 1
        await client.revoke(lease)
        assert len(await next_events(watch, 2)) == 2


@pytest.mark.parametrize("version", NEWER)
def test_job_that_fills_etcd_gains_no_permissions(version: str, start_etcd: StartEtcd) -> None:
    """On 3.5 it does: with a full database, etcd skips permission checks of deletes and users."""
    server = start_etcd(version, arguments=[*CHEAP, "--quota-backend-bytes=4000000"])

    async def main() -> None:
        async with root_of(server) as root, client_of(server, "b") as b:
            users = Users(root)
            await users.enable_auth()
            await make_job(users, "b")
            await root.put(Put(KEY, b"secret"))
            with pytest.raises(EtcdError, match="database space exceeded"):
                await fill(b, "/b/")
            guarded = IN_USERS | {name: IN_KEYS[name] for name in ("delete", "delete all", "read")}
            outcomes = {name: await outcome(act, b, 0) for name, act in guarded.items()}
            assert outcomes == dict.fromkeys(guarded, REFUSED)
            await b.txn(Txn((), (Delete("/b/", True),)))  # it can make room again
            await users.delete_user("b")  # and it can be removed

    asyncio.run(main())


async def fill(client: Client, prefix: str) -> None:
    for number in range(1000):
        await client.put(Put(f"{prefix}{number}", bytes(100_000)))
