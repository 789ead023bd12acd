"""Etcd user of each job, with TLS: created, used by a gang, repaired and removed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.etcd_tls.job_users import (
    access_for,
    remove_job,
    remove_old_users,
    remove_users,
    uids_with_users,
    user_name,
)
from elasticjob_operator.etcd_tls.user_audit import unknown_access
from elasticjob_rendezvous.etcd.client import Client, LoginFiles, Tls
from elasticjob_rendezvous.etcd.errors import PermissionDenied, Unauthenticated, Unavailable
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.kv import KeyValue, Put, Range
from elasticjob_rendezvous.protocol.records.keys import Keys, job_folder, job_prefix
from tests.integration.certificates import Certificates
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import VERSIONS, EtcdServer
from tests.integration.rendezvous_gang import (
    DEADLINE_SECONDS,
    FAST,
    Node,
    settings,
    together,
    until,
)

ROOT_PASSWORD = "the root password"
GUARDED = VERSIONS[1:]
CHEAP = "--bcrypt-cost=4"
NAMESPACE = "team"


@pytest.fixture(params=GUARDED)
def server(
    request: pytest.FixtureRequest, start_etcd: StartEtcd, certificates: Certificates
) -> EtcdServer:
    # Unused tokens expire within a second.
    arguments = [CHEAP, "--auth-token-ttl=1"]
    return start_etcd(request.param, certificates=certificates, arguments=arguments)


@pytest.fixture
def jwt_server(start_etcd: StartEtcd, certificates: Certificates, tmp_path: Path) -> EtcdServer:
    """Start a server whose tokens carry the revision of users and roles."""
    key = tmp_path / "jwt.key"
    key.write_text("a key that signs tokens")
    token = f"--auth-token=jwt,priv-key={key},sign-method=HS256,ttl=10m"
    return start_etcd(certificates=certificates, arguments=[CHEAP, token])


def tls_of(server: EtcdServer) -> Tls:
    assert server.certificates is not None
    return Tls(server.certificates.ca_file)


def client_of(server: EtcdServer, access: Access) -> Client:
    return Client(
        [server.url],
        tls=tls_of(server),
        user=access.user,
        password=access.password,
        request_timeout_seconds=DEADLINE_SECONDS,  # a server that starts on a busy machine
    )


@contextlib.asynccontextmanager
async def administrator(server: EtcdServer) -> AsyncIterator[tuple[Client, Users]]:
    access = Access(b"", None, ROOT, ROOT_PASSWORD)
    async with client_of(server, access) as client:
        yield client, Users(client)


@contextlib.asynccontextmanager
async def gang_of(
    server: EtcdServer,
    uid: str,
    access: Access,
    names: list[str],
    files: LoginFiles | None = None,
) -> AsyncIterator[list[Node]]:
    """Yield members that have only the content of the job's Secret, `files` if it changes."""
    bounds = dataclasses.replace(FAST, expected=len(names))
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for name in names:
            mine = dataclasses.replace(
                settings(server.url, job_prefix(NAMESPACE, uid, 0), name, bounds),
                tls=tls_of(server),
                user=access.user,
                password=access.password,
                job_key=access.job_key,
                login_files=files,
            )
            nodes.append(await stack.enter_async_context(Node(mine)))
        yield nodes


def test_job_access_is_created_once(server: EtcdServer) -> None:
    async def main() -> None:
        async with administrator(server) as (_, users):
            access = await access_for(users, NAMESPACE, "a", None, b"ca")
            other = await access_for(users, NAMESPACE, "b", None, b"ca")
            assert access.user == user_name("a")
            assert access.password
            assert min(len(access.job_key), len(access.password)) >= 32
            secrets = {access.job_key, other.job_key, access.password, other.password}
            assert len(secrets) == 4
            again = await access_for(users, NAMESPACE, "a", access, b"ca and new")
            assert again == dataclasses.replace(access, ca=b"ca and new")

            async with client_of(server, access) as client:
                await client.put(Put(job_prefix(NAMESPACE, "a", 0) + "k", b""))
                await client.put(Put(job_prefix(NAMESPACE, "a", 7) + "k", b""))
                for stranger in (
                    job_prefix(NAMESPACE, "b", 0),
                    job_prefix("other", "a", 0),
                    job_folder(NAMESPACE, "a")[:-1],
                    job_prefix(NAMESPACE, "aa", 0),
                ):
                    with pytest.raises(PermissionDenied):
                        await client.put(Put(stranger + "k", b""))

    asyncio.run(main())


def test_missing_or_wrong_access_is_repaired(server: EtcdServer) -> None:
    async def works(access: Access) -> None:
        async with client_of(server, access) as client:
            await client.put(Put(job_prefix(NAMESPACE, "a", 0) + "k", b""))

    async def main() -> None:
        async with administrator(server) as (_, users):
            access = await access_for(users, NAMESPACE, "a", None, None)
            # Another operator was about to make the Secret, and was too late.
            await access_for(users, NAMESPACE, "a", None, None)
            with pytest.raises(Unauthenticated):
                await works(access)
            assert await access_for(users, NAMESPACE, "a", access, None) == access
            await works(access)
            server.kill()
            server.wipe()
            await asyncio.to_thread(server.start)
        async with administrator(server) as (_, users):
            assert await access_for(users, NAMESPACE, "a", access, None) == access
            await works(access)

    asyncio.run(main())


def test_job_without_users_has_only_its_key() -> None:
    async def main() -> None:
        access = await access_for(None, NAMESPACE, "a", None, b"ca")
        assert access == Access(access.job_key, b"ca", None, None)
        assert await access_for(None, NAMESPACE, "a", access, b"ca") == access

    asyncio.run(main())


def test_forgotten_job_leaves_no_access(server: EtcdServer) -> None:
    async def main() -> None:
        async with administrator(server) as (client, users):
            access = await access_for(users, NAMESPACE, "a", None, None)
            other = await access_for(users, NAMESPACE, "b", None, None)
            async with client_of(server, access) as job, client_of(server, other) as neighbour:
                for incarnation in range(3):
                    await job.put(Put(job_prefix(NAMESPACE, "a", incarnation) + "k", b""))
                await neighbour.put(Put(job_prefix(NAMESPACE, "b", 0) + "k", b""))
                assert await uids_with_users(users) == {"a", "b"}
                for _ in range(2):
                    await remove_job(client, users, NAMESPACE, "a")
                    left = (await client.range(Range("/", True))).kvs
                    assert [kv.key for kv in left] == [job_prefix(NAMESPACE, "b", 0) + "k"]
                    assert set(await users.users()) == {ROOT, user_name("b")}
                    assert set(await users.roles()) == {ROOT, user_name("b")}
                with pytest.raises(Unauthenticated):  # a surviving pod of the job
                    await job.put(Put(job_prefix(NAMESPACE, "a", 0) + "k", b""))
                await neighbour.put(Put(job_prefix(NAMESPACE, "b", 0) + "k", b""))

    asyncio.run(main())


def test_gang_trains_while_users_change(server: EtcdServer) -> None:
    asyncio.run(undisturbed(server))


def test_gang_trains_when_every_change_revokes_tokens(jwt_server: EtcdServer) -> None:
    asyncio.run(undisturbed(jwt_server))


async def undisturbed(server: EtcdServer) -> None:
    async with administrator(server) as (client, users):
        access = await access_for(users, NAMESPACE, "a", None, None)
        async with gang_of(server, "a", access, ["one", "two", "three"]) as nodes:
            await until(lambda: together(nodes), "a round")
            everything = Range(job_folder(NAMESPACE, "a"), True)
            await until(lambda: all(node.running for node in nodes), "workers")
            written = await settled(client, everything)
            told = [len(node.seen) for node in nodes]
            for number in range(25):
                await access_for(users, NAMESPACE, f"other-{number}", None, None)
            for number in range(25):
                await remove_job(client, users, NAMESPACE, f"other-{number}")
            await asyncio.sleep(4.5)  # two lifetimes of a lease and a token, by etcd's clock
            assert together(nodes)
            assert [len(node.seen) for node in nodes] == told
            assert (await client.range(everything)).kvs == written, "somebody had to write"
            await nodes[2].crash()
            await until(lambda: together(nodes[:2], after=1), "a round of those who are left")


def test_gang_trains_after_etcd_lost_data_and_users(server: EtcdServer) -> None:
    async def main() -> None:
        async with administrator(server) as (client, users):
            access = await access_for(users, NAMESPACE, "a", None, None)
            async with gang_of(server, "a", access, ["one", "two"]) as nodes:
                await until(lambda: together(nodes), "a round")
                server.kill()
                server.wipe()
                await asyncio.to_thread(server.start)
                # Another job's turn comes first, so for a while this one is unknown.
                other = await patiently(lambda: access_for(users, NAMESPACE, "other", None, None))
                async with client_of(server, other) as stranger:
                    with pytest.raises(PermissionDenied):
                        await stranger.range(Range(job_folder(NAMESPACE, "a"), True))
                mended = await patiently(lambda: access_for(users, NAMESPACE, "a", access, None))
                assert mended == access
                await sessions(client, 2)
                await until(lambda: together(nodes), "the members to be back")
                assert [node.started for node in nodes] == [[1], [1]]

    asyncio.run(main())


async def patiently(ask: Callable[[], Awaitable[Access]]) -> Access:
    """Repeat the request as the operator does: etcd may be away, or may have revoked a token while
    users were being replaced.
    """
    for _ in range(3):
        with contextlib.suppress(Unavailable, Unauthenticated):
            return await ask()
    return await ask()


async def sessions(client: Client, number: int) -> None:
    """Wait until `number` members of the job have a key in etcd."""
    target = Range(Keys(job_prefix(NAMESPACE, "a", 0)).members, True)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len((await client.range(target)).kvs) != number:
            await asyncio.sleep(0.05)


async def settled(client: Client, target: Range) -> tuple[KeyValue, ...]:
    """Return the keys once writing has stopped."""
    before: tuple[KeyValue, ...] = ()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (found := (await client.range(target)).kvs) != before:
            before = found
            await asyncio.sleep(0.5)
    return found


def test_gang_trains_while_its_user_is_rotated(server: EtcdServer, tmp_path: Path) -> None:
    asyncio.run(rotated(server, tmp_path))


def test_gang_trains_while_its_user_is_rotated_and_tokens_are_jwts(
    jwt_server: EtcdServer, tmp_path: Path
) -> None:
    asyncio.run(rotated(jwt_server, tmp_path))


async def rotated(server: EtcdServer, folder: Path) -> None:
    """Rotate a gang's user three times. No member leaves, and a new round forms afterwards."""
    files = LoginFiles(folder / "user", folder / "password")
    async with administrator(server) as (client, users):
        access = await access_for(users, NAMESPACE, "a", None, None)
        mount(access, files)
        async with gang_of(server, "a", access, ["one", "two", "three"], files) as nodes:
            await until(lambda: together(nodes), "a round")
            everything = Range(job_folder(NAMESPACE, "a"), True)
            await until(lambda: all(node.running for node in nodes), "workers")
            written = await settled(client, everything)
            told = [len(node.seen) for node in nodes]
            for number in range(1, 4):
                former = access
                access = await access_for(users, NAMESPACE, "a", former, None, rotate=True)
                assert access.user == user_name("a", number)
                mount(access, files)
                await asyncio.sleep(1.0)  # half a lease
                gone = await remove_old_users(users, "a", access)
                assert gone == (former.user,)
                async with client_of(server, former) as stranger:
                    with pytest.raises(Unauthenticated):
                        await stranger.range(everything)
            await asyncio.sleep(4.5)  # two lifetimes of a lease and a token, by etcd's clock
            assert together(nodes)
            assert [len(node.seen) for node in nodes] == told
            assert (await client.range(everything)).kvs == written, "somebody had to write"
            await nodes[2].crash()
            await until(lambda: together(nodes[:2], after=1), "a round of those who are left")


def mount(access: Access, files: LoginFiles) -> None:
    """Write user and password as a kubelet renews a mounted Secret."""
    assert access.user
    assert access.password
    Path(files.user).write_text(access.user)
    Path(files.password).write_text(access.password)


def test_rotation_may_be_interrupted_after_each_step(server: EtcdServer) -> None:
    """Each attempt has a new process, which knows the Secret and etcd alone."""

    async def works(access: Access) -> None:
        async with client_of(server, access) as client:
            await client.put(Put(job_prefix(NAMESPACE, "a", 0) + "k", b""))

    async def main() -> None:
        async with administrator(server) as (_, users):
            secret = await access_for(users, NAMESPACE, "a", None, None)
            # It dies before it writes the Secret, and the next one repeats the rotation.
            lost = await access_for(users, NAMESPACE, "a", secret, None, rotate=True)
            await works(secret)
        async with administrator(server) as (_, users):
            rotated = await access_for(users, NAMESPACE, "a", secret, None, rotate=True)
            assert rotated.user == lost.user
            await works(secret)
            await works(rotated)
            with pytest.raises(Unauthenticated):
                await works(lost)
            # Two replicas in one rotation: the one that lost the Secret sets its password last.
            async with administrator(server) as (_, others):
                await access_for(others, NAMESPACE, "a", secret, None, rotate=True)
            assert await remove_old_users(users, "a", rotated) == (user_name("a"),)
            await works(rotated)
            assert await remove_old_users(users, "a", rotated) == ()
        async with administrator(server) as (_, users):
            assert await access_for(users, NAMESPACE, "a", rotated, None) == rotated
            assert await uids_with_users(users) == {"a"}
            assert await unknown_access(users, frozenset()) == ()
            await users.put_user("job-a.7", "left by an intruder")
            await users.grant("job-a.7", ROOT)
            await users.put_user("job-a.x", "left by an intruder")
            await users.put_role("job-a.7", job_folder(NAMESPACE, "a"))
            found = sorted(str(one) for one in await unknown_access(users, frozenset()))
            assert found == ["role 'job-a.7'", "role 'root' of user 'job-a.7'", "user 'job-a.x'"]
            await remove_users(users, "a")
            assert set(await users.users()) == {ROOT, "job-a.x"}

    asyncio.run(main())


def test_gang_survives_changed_password(server: EtcdServer) -> None:
    """The gang's members are lost from etcd and train on; with the right password they return."""

    async def main() -> None:
        async with administrator(server) as (client, users):
            access = await access_for(users, NAMESPACE, "a", None, None)
            async with gang_of(server, "a", access, ["one", "two"]) as nodes:
                await until(lambda: together(nodes), "a round")
                await users.put_user(user_name("a"), "another password")
                await sessions(client, 0)
                assert all(node.running for node in nodes)
                await access_for(users, NAMESPACE, "a", access, None)
                await sessions(client, 2)
                await until(lambda: together(nodes), "the members to be back")
                assert [node.started for node in nodes] == [[1], [1]]

    asyncio.run(main())
