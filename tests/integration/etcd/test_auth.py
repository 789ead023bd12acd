"""Users, roles and tokens against every supported etcd version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elasticjob_rendezvous.etcd.client import Client, LoginFiles
from elasticjob_rendezvous.etcd.errors import LeaseLost, PermissionDenied, Unauthenticated
from elasticjob_rendezvous.protocol.kv import Put, Range, Txn
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.watches import drained, events_of, opened
from tests.integration.etcd_server import VERSIONS, EtcdServer

ROOT = "root:secret"
PATIENCE_SECONDS = 60.0


def enable_auth(server: EtcdServer) -> None:
    """Add root, and a user `job` limited to /job/, and enable authentication."""
    server.ctl("user", "add", ROOT)
    server.ctl("user", "grant-role", "root", "root")
    server.ctl("user", "add", "job:pass")
    server.ctl("role", "add", "job")
    server.ctl("role", "grant-permission", "job", "--prefix=true", "readwrite", "/job/")
    server.ctl("user", "grant-role", "job", "job")
    server.ctl("auth", "enable")


@pytest.fixture(params=VERSIONS)
def guarded_etcd(request: pytest.FixtureRequest, start_etcd: StartEtcd) -> EtcdServer:
    # Cheap password hashes, and tokens that expire within a test.
    options = ["--auth-token-ttl=1", "--bcrypt-cost=4"]
    server = start_etcd(request.param, arguments=options)
    enable_auth(server)
    return server


def client_of(server: EtcdServer, user: str | None = "job", password: str = "pass") -> Client:
    return Client([server.url], user=user, password=password)


def test_users_permissions_and_stale_tokens_are_handled(guarded_etcd: EtcdServer) -> None:
    async def main() -> None:
        async with client_of(guarded_etcd) as client:
            await works(client)
            await is_refused_outside_its_prefix(client)
            for make_stale in (expire_tokens, restart, change_permissions):
                await make_stale(guarded_etcd)
                await works(client)
            await change_permissions(guarded_etcd)  # now a watch is the first to notice
            await opened(client.watch([Range("/job/", True)], 0))
            lease = await client.grant(30)
            await restart(guarded_etcd)  # now several requests at once
            await asyncio.gather(
                client.keep_alive(lease.id),
                client.txn(Txn((), (Put("/job/t", b""),))),
                client.range(Range("/job/", True)),
            )
        await wrong_credentials_are_refused(guarded_etcd)

    asyncio.run(main())


@pytest.mark.parametrize("ask", ["put", "watch", "several"])
def test_token_from_before_data_loss_does_not_block_requests(
    guarded_etcd: EtcdServer, ask: str
) -> None:
    """The token names a log position that the new etcd is far from: etcd would wait for that
    position, and forever if there are no other writes.
    """

    async def main() -> None:
        admin = Client([guarded_etcd.url], user="root", password="secret")
        urls = [guarded_etcd.url]
        patient = Client(
            urls, user="job", password="pass", request_timeout_seconds=PATIENCE_SECONDS
        )
        async with patient as client, admin:
            for _ in range(200):  # more than needed to make the users again
                await admin.put(Put("/k", b""))
            await client.put(Put("/job/k", b""))  # with a token of the same age
            guarded_etcd.kill()
            guarded_etcd.wipe()
            await asyncio.to_thread(guarded_etcd.start)
            await asyncio.to_thread(enable_auth, guarded_etcd)
            requests = {
                "put": lambda: client.put(Put("/job/k", b"")),
                "watch": lambda: opened(client.watch([Range("/job/", True)], 0)),
                "keep_alive": lambda: gone(client),
                "range": lambda: client.range(Range("/job/", True)),
            }
            asked = requests.values() if ask == "several" else [requests[ask]]
            begin = asyncio.get_running_loop().time()
            await asyncio.gather(*(request() for request in asked))
            assert asyncio.get_running_loop().time() - begin < PATIENCE_SECONDS / 2

    async def gone(client: Client) -> None:
        with pytest.raises(LeaseLost):
            await client.keep_alive(7)

    asyncio.run(main())


async def works(client: Client) -> None:
    revision = await client.put(Put("/job/k", b""))
    (event,) = await events_of(client.watch([Range("/job/", True)], revision), 1)
    assert event.mod_revision == revision
    lease = await client.grant(30)
    assert await client.keep_alive(lease.id) == 30
    await client.revoke(lease.id)
    assert (await client.status()).revision >= revision


async def is_refused_outside_its_prefix(client: Client) -> None:
    with pytest.raises(PermissionDenied, match="put '/other'"):
        await client.put(Put("/other", b""))
    with pytest.raises(PermissionDenied):
        await client.range(Range("/", True))
    with pytest.raises(PermissionDenied):
        await client.txn(Txn((), (Put("/job/k", b""), Put("/other", b""))))
    with pytest.raises(PermissionDenied):
        await drained(client.watch([Range("/job/", True), Range("/other")], 0))


async def expire_tokens(server: EtcdServer) -> None:
    await asyncio.sleep(2.1)  # etcd's own clock decides; there is nothing to poll


async def restart(server: EtcdServer) -> None:
    await asyncio.to_thread(server.restart)  # a server holds its tokens in memory


async def change_permissions(server: EtcdServer) -> None:
    """Outdate every token's revision."""
    grant = ("role", "grant-permission", "job", "read", "/unrelated")
    await asyncio.to_thread(server.ctl, *grant, user=ROOT)
    revoke = ("role", "revoke-permission", "job", "/unrelated")
    await asyncio.to_thread(server.ctl, *revoke, user=ROOT)


async def wrong_credentials_are_refused(server: EtcdServer) -> None:
    for user, password in ((None, ""), ("job", "wrong"), ("nobody", "pass")):
        async with client_of(server, user, password) as client:
            with pytest.raises(Unauthenticated, match="user and password"):
                await client.put(Put("/job/k", b""))
            with pytest.raises((Unauthenticated, PermissionDenied)):
                await drained(client.watch([Range("/job/", True)], 0))


def test_client_takes_the_next_user_from_its_files_when_etcd_refuses_the_last(
    guarded_etcd: EtcdServer, tmp_path: Path
) -> None:
    """No request fails: neither one alone, nor one of several, nor a new watch or keep-alive."""
    files = LoginFiles(tmp_path / "user", tmp_path / "password")

    def write(user: str, password: str) -> None:
        (tmp_path / "user").write_text(user)
        (tmp_path / "password").write_text(password + "\n")

    async def main() -> None:
        write("job", "pass")
        client = Client([guarded_etcd.url], user="job", password="pass", login_files=files)
        async with client:
            lease = await client.grant(30)
            await client.txn(Txn((), (Put("/job/leased", b"", lease=lease.id),)))
            await client.keep_alive(lease.id)
            for number in range(2):
                name = f"job.{number}"
                await asyncio.to_thread(guarded_etcd.ctl, "user", "add", f"{name}:new", user=ROOT)
                grant = ("user", "grant-role", name, "job")
                await asyncio.to_thread(guarded_etcd.ctl, *grant, user=ROOT)
                write(name, "new")
                await works(client)
                before = "job" if number == 0 else f"job.{number - 1}"
                await asyncio.to_thread(guarded_etcd.ctl, "user", "delete", before, user=ROOT)
                await asyncio.gather(
                    client.keep_alive(lease.id), client.range(Range("/job/", True)), works(client)
                )
                assert len((await client.range(Range("/job/leased"))).kvs) == 1

    asyncio.run(main())


def test_unreadable_credential_files_leave_the_last_credentials(tmp_path: Path) -> None:
    files = LoginFiles(tmp_path / "user", tmp_path / "password")
    assert files.read() is None
    (tmp_path / "user").write_text("job\n")
    assert files.read() is None
    (tmp_path / "password").write_text("")
    assert files.read() is None
    (tmp_path / "password").write_text("pass\n")
    assert files.read() == ("job", "pass")


def test_credentials_are_ignored_until_authentication_is_enabled(
    start_etcd: StartEtcd,
) -> None:
    server = start_etcd(arguments=["--bcrypt-cost=4"])

    async def main() -> None:
        async with client_of(server) as client:
            await client.put(Put("/other", b""))
            await asyncio.to_thread(enable_auth, server)
            await client.put(Put("/job/k", b""))
            with pytest.raises(PermissionDenied):
                await client.put(Put("/other", b""))

    asyncio.run(main())
