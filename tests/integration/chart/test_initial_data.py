"""First data of the chart's etcd: authentication is on before a client can connect."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticjob_operator.etcd_tls.certificates import (
    AGENTS_CERT,
    AGENTS_KEY,
    OPERATOR_CERT,
    OPERATOR_KEY,
    PASSWORD,
    Data,
)
from elasticjob_rendezvous.etcd.errors import EtcdError, PermissionDenied, Unauthenticated
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.kv import Put, Range
from tests.integration.chart.etcd_members import NAME, SECONDS, Member, client, started
from tests.integration.helm_chart import Json, pod_template, render

OPERATOR = OPERATOR_CERT, OPERATOR_KEY
Cluster = tuple[list[Member], Data]
SIZES = pytest.mark.parametrize(
    "cluster", [{}, {"etcd": {"members": 3}}], ids=["one", "three"], indirect=True
)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Yield the members that the parameter's values request, started together."""
    with started(getattr(request, "param", {}), tmp_path) as (members, data):
        yield members, data


async def check_closed(members: list[Member]) -> None:
    """Check that an agent's certificate opens nothing and root is the only user."""
    async with client(members) as agent, client(members, pair=OPERATOR) as operator:
        for attempt in (agent.range(Range("/a")), agent.put(Put("/a", b"x"))):
            with pytest.raises(PermissionDenied):
                await attempt
        with pytest.raises(EtcdError):
            await Users(agent).put_user("intruder", "secret")
        assert await Users(operator).users() == (ROOT,)
        assert await Users(operator).roles() == (ROOT,)


async def check_serves_operator(members: list[Member], data: Data) -> None:
    """Check that the operator sets root's password and gives a job access."""
    password = data[PASSWORD].decode()
    async with (
        client(members, ROOT, password, OPERATOR) as root,
        client(members, pair=OPERATOR) as certified,
        client(members, "job-1", "secret") as job,
    ):
        users = Users(root)
        with pytest.raises(Unauthenticated):
            await users.has_role("job-1")
        await Users(certified).put_user(ROOT, password)
        await users.enable_auth()
        await users.put_role("job-1", "/elasticjob/ns/1/")
        await users.put_user("job-1", "secret")
        await users.grant("job-1", "job-1")
        await job.put(Put("/elasticjob/ns/1/a", b"x"))
    pair = client(members, ROOT, password, (AGENTS_CERT, AGENTS_KEY))
    async with pair as root:
        assert await Users(root).users() == ("job-1", ROOT), "the password is the operator's"


@SIZES
def test_new_etcd_has_authentication_before_the_operator_connects(cluster: Cluster) -> None:
    members, data = cluster

    async def main() -> None:
        await check_closed(members)
        await check_serves_operator(members, data)

    asyncio.run(main())


@SIZES
def test_etcd_that_lost_all_data_has_authentication_again(cluster: Cluster) -> None:
    members, data = cluster
    asyncio.run(check_serves_operator(members, data))
    for member in members:
        member.kill()
        shutil.rmtree(member.data)

    async def main() -> None:
        intruder = asyncio.create_task(make_itself_root(members))
        await asyncio.to_thread(restart, members)
        await check_closed(members)
        intruder.cancel()
        with suppress(asyncio.CancelledError):
            await intruder
        assert not intruder.done() or intruder.cancelled(), "an agent has become root"
        await check_serves_operator(members, data)

    asyncio.run(main())


def restart(members: list[Member]) -> None:
    for member in members:
        member.start()
    for member in members:
        member.wait_ready()


async def make_itself_root(members: list[Member]) -> None:
    """Try to create a user with an agent's certificate until etcd permits it."""
    async with client(members) as agent:
        while True:
            with suppress(EtcdError):
                await Users(agent).put_user("intruder", "secret")
                return
            await asyncio.sleep(0.005)


def test_restarted_member_keeps_its_data(cluster: Cluster) -> None:
    (member,), data = cluster
    asyncio.run(check_serves_operator([member], data))
    member.kill()
    assert "has data" in member.prepare()
    restart([member])

    async def main() -> None:
        async with client([member], "job-1", "secret") as job:
            assert (await job.range(Range("/elasticjob/ns/1/a"))).kvs[0].value == b"x"

    asyncio.run(main())


@pytest.mark.parametrize("cluster", [{"etcd": {"members": 3}}], ids=["three"], indirect=True)
def test_member_that_lost_its_data_does_not_vote_with_first_data(cluster: Cluster) -> None:
    """It may have acknowledged writes: etcd refuses such a member, as without init containers."""
    members, data = cluster
    asyncio.run(check_serves_operator(members, data))
    lost = members[0]
    lost.kill()
    shutil.rmtree(lost.data)
    assert f"knows {NAME}-0" in lost.prepare()
    assert not lost.data.exists()
    lost.start()
    assert lost.process is not None
    assert lost.process.wait(SECONDS) != 0
    assert "already been bootstrapped" in lost.log()


def test_pod_that_ended_between_two_init_containers_starts_again(cluster: Cluster) -> None:
    (member,), data = cluster
    member.kill()
    shutil.rmtree(member.data)
    prepare, restore, install = member.init_commands()
    for command in (prepare, restore):
        subprocess.run(command, check=True, capture_output=True)
    unfinished = member.data.with_name("data.new") / "member"
    unfinished.mkdir(parents=True)
    (member.data / "member" / "snap").mkdir(parents=True)
    assert "authentication enabled" in member.prepare()
    assert not unfinished.exists()
    restart([member])

    async def main() -> None:
        await check_closed([member])
        await check_serves_operator([member], data)

    asyncio.run(main())
    assert subprocess.run(install, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "values",
    [
        {"tls": {"clientCertificates": "Optional"}},
        {"tls": {"enabled": False}},
        {"auth": {"enabled": False}},
        {
            "certificates": {"existingSecret": "own"},
            "tls": {"clientCertificates": "Required"},
        },
    ],
    ids=["optional", "plain", "open", "own"],
)
def test_etcd_starts_empty_where_no_certificate_is_known_to_be_roots(values: Json) -> None:
    pod = pod_template(render({"etcd": values}).find("StatefulSet", NAME))["spec"]
    assert "initContainers" not in pod
    assert "initial" not in [volume["name"] for volume in pod.get("volumes", ())]
