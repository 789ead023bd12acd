"""Chart's etcd, as its StatefulSet starts it: real members, certificates and users."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from elasticjob_operator.etcd_tls.certificates import (
    AGENTS_CERT,
    AGENTS_KEY,
    BUNDLE,
    CERT,
    KEY,
    OPERATOR_CERT,
    OPERATOR_KEY,
    PASSWORD,
    Data,
)
from elasticjob_rendezvous.etcd.client import Client, Tls
from elasticjob_rendezvous.etcd.errors import PermissionDenied, Unavailable
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.kv import Put, Range
from tests.integration.certificates import Certificates, KeyPair
from tests.integration.chart.etcd_members import (
    MOUNTED,
    NAME,
    Member,
    client,
    secret,
    signed,
    started,
)
from tests.integration.etcd_server import VERSIONS, EtcdServer
from tests.integration.helm_chart import CHART, NAMESPACE


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[Member], Data]]:
    """Yield the members that the parameter's values request, started together."""
    with started(getattr(request, "param", {}), tmp_path) as (members, data):
        yield members, data


@pytest.mark.parametrize(
    "cluster", [{}, {"etcd": {"members": 3}}], ids=["one", "three"], indirect=True
)
def test_users_are_limited_to_their_keys_and_anonymous_access_is_refused(
    cluster: tuple[list[Member], Data],
) -> None:
    members, data = cluster
    password = data[PASSWORD].decode()
    operator = OPERATOR_CERT, OPERATOR_KEY

    async def main() -> None:
        async with (
            client(members, ROOT, password, operator) as root,
            client(members, pair=operator) as certified,
            client(members, "job-1", "secret") as job,
            client(members) as nobody,
        ):
            await Users(certified).put_user(ROOT, password)
            users = Users(root)
            await users.put_role("job-1", "/elasticjob/ns/1/")
            await users.put_user("job-1", "secret")
            await users.grant("job-1", "job-1")
            await job.put(Put("/elasticjob/ns/1/a", b"x"))
            with pytest.raises(PermissionDenied):
                await job.range(Range("/elasticjob/ns/2/a"))
            with pytest.raises(PermissionDenied):
                await nobody.range(Range("/elasticjob/ns/1/a"))
            assert await Users(certified).roles_of("job-1") == ("job-1",), "its name is root"

    asyncio.run(main())


async def is_connected(connection: Client) -> bool:
    """Return True if etcd answers, if only by a refusal."""
    try:
        await connection.range(Range("/a"))
    except PermissionDenied:
        return True
    except Unavailable:  # etcd ends the connection: TLS 1.3 has no other answer
        return False
    return True


@pytest.mark.parametrize(
    "cluster",
    [{}, {"etcd": {"members": 3}}, {"etcd": {"tls": {"clientCertificates": "Optional"}}}],
    ids=["one", "three", "optional"],
    indirect=True,
)
def test_new_etcd_answers_only_clients_with_certificates_of_its_authority(
    cluster: tuple[list[Member], Data], request: pytest.FixtureRequest
) -> None:
    """Before the operator has connected, and after loss of the data."""
    members, _ = cluster
    stranger = signed({}, "localhost")
    for name in (CERT, KEY):
        (members[0].folder / "tls" / f"stranger-{name}").write_bytes(stranger[name])

    async def main() -> None:
        for pair in (None, (f"stranger-{CERT}", f"stranger-{KEY}")):
            async with client(members, pair=pair) as outsider:
                assert await is_connected(outsider) is ("optional" in request.node.name)
        async with client(members) as agent:
            assert await is_connected(agent)

    asyncio.run(main())


def test_client_certificates_open_no_peer_port(cluster: tuple[list[Member], Data]) -> None:
    (member,), data = cluster
    for cert, key in ((OPERATOR_CERT, OPERATOR_KEY), (AGENTS_CERT, AGENTS_KEY)):
        assert not is_peer(member, data | {CERT: data[cert], KEY: data[key]})


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_agent_without_token_logs_in_and_root_is_known_by_certificate(
    version: str, tmp_path: Path, start_etcd: Callable[..., EtcdServer]
) -> None:
    """An agent connects while etcd, which lost its data, has no users, and goes on afterwards."""
    data = signed({}, "localhost", "127.0.0.1")
    for name in MOUNTED:
        (tmp_path / name).write_bytes(data[name])
    server = start_etcd(
        version,
        certificates=Certificates(
            tmp_path / BUNDLE,
            KeyPair(tmp_path / CERT, tmp_path / KEY),
            KeyPair(tmp_path / AGENTS_CERT, tmp_path / AGENTS_KEY),
        ),
        client_certificates=True,
        arguments=("--bcrypt-cost=4",),
    )

    def tls(cert: str, key: str) -> Tls:
        return Tls(tmp_path / BUNDLE, tmp_path / cert, tmp_path / key)

    async def main() -> None:
        agents, operator = tls(AGENTS_CERT, AGENTS_KEY), tls(OPERATOR_CERT, OPERATOR_KEY)
        async with (
            Client([server.url], tls=agents, user="job-1", password="secret") as job,
            Client([server.url], tls=agents) as nobody,
            Client([server.url], tls=operator) as certified,
            Client([server.url], tls=operator, user=ROOT, password="secret") as root,
        ):
            await job.put(Put("/elasticjob/ns/1/a", b"before"))
            users = Users(root)
            await users.put_role("job-1", "/elasticjob/ns/1/")
            await users.put_user("job-1", "secret")
            await users.grant("job-1", "job-1")
            await users.enable_auth()
            await job.put(Put("/elasticjob/ns/1/a", b"after"))
            with pytest.raises(PermissionDenied):
                await job.range(Range("/elasticjob/ns/2/a"))
            with pytest.raises(PermissionDenied):
                await nobody.range(Range("/elasticjob/ns/1/a"))
            assert await Users(certified).roles_of("job-1") == ("job-1",)

    asyncio.run(main())


def test_client_certificate_names_its_user_and_nobody_without_one() -> None:
    data = secret()
    for cert, user in ((OPERATOR_CERT, ROOT), (AGENTS_CERT, "")):
        shown = x509.load_pem_x509_certificate(data[cert])
        names = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        assert [name.value for name in names] == [user] * bool(user)


@pytest.mark.parametrize("cluster", [{"etcd": {"members": 3}}], ids=["three"], indirect=True)
def test_two_members_continue_and_third_returns(cluster: tuple[list[Member], Data]) -> None:
    members, _ = cluster

    async def main() -> None:
        async with client(members, pair=(OPERATOR_CERT, OPERATOR_KEY)) as connection:
            await connection.put(Put("/a", b"1"))
            members[0].kill()
            assert (await connection.range(Range("/a"))).kvs[0].value == b"1"

    asyncio.run(main())
    members[0].start()
    members[0].wait_ready()


def is_peer(member: Member, data: Data) -> bool:
    """Return True if the member's peer port serves a client with this certificate."""
    folder = Path(tempfile.mkdtemp(dir=member.folder))
    for item in ("ca.crt", "tls.crt", "tls.key"):
        (folder / item).write_bytes(data[item])
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    url = f"https://127.0.0.1:{member.ports.numbers[1]}/version"
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_peers_need_etcds_own_name_beside_its_authority(
    cluster: tuple[list[Member], Data],
) -> None:
    (member,), data = cluster
    assert is_peer(member, data)
    for name in ("web.tenant-a.svc", f"{NAME}.{NAMESPACE}.svc", f"*.{NAMESPACE}.svc"):
        foreign = signed(data, name)
        assert foreign["ca.crt"] == data["ca.crt"]
        assert foreign["tls.crt"] != data["tls.crt"]
        assert not is_peer(member, foreign), name


def test_data_is_stored_on_the_volume(cluster: tuple[list[Member], Data]) -> None:
    (member,), _ = cluster
    assert (member.folder / "member-0" / "data" / "member" / "wal").is_dir()


def test_probes_and_metrics_are_served(cluster: tuple[list[Member], Data]) -> None:
    (member,), _ = cluster
    assert member.page(member.probe("livenessProbe")) == (200, "ok\n")
    code, text = member.page("/metrics")
    assert code == 200
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\betcd_\w+", target["expr"])
    }
    assert len(asked) >= 4
    assert {name for name in asked if name not in text} == set()


def test_quota_and_durations_are_passed_in_etcd_units(
    cluster: tuple[list[Member], Data],
) -> None:
    (member,), _ = cluster
    assert "etcd_server_quota_backend_bytes 2.147483648e+09" in member.page("/metrics")[1]
    log = (member.folder / "member-0.log").read_text()
    started = next(
        json.loads(line) for line in log.splitlines() if "starting an etcd server" in line
    )
    assert started["heartbeat-interval"] == "100ms"
    assert started["election-timeout"] == "1s"
    assert started["auto-compaction-retention"] == "5m0s"
    assert started["snapshot-count"] == 10000
