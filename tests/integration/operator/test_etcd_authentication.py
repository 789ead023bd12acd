"""Authentication in etcd: enabled once each job has a user there."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from elasticjob_operator.domain.manifests.names import ROTATE_ANNOTATION
from elasticjob_operator.etcd_tls.certificate_rotation import Wanted, due_changes
from elasticjob_operator.etcd_tls.certificates import (
    AGENTS_CERT,
    AGENTS_KEY,
    BUNDLE,
    CERT,
    KEY,
    OPERATOR_CERT,
    OPERATOR_KEY,
    USER,
    apply_changes,
    parse_data,
)
from elasticjob_operator.etcd_tls.initial_data import PREPARED, prepare
from elasticjob_rendezvous.etcd.client import Client, Tls
from elasticjob_rendezvous.etcd.errors import EtcdError, PermissionDenied, Unauthenticated
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.kv import Put, Range, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Outcome,
    OutcomeKind,
    Round,
    RoundState,
)
from tests.integration.apiserver import ApiServer
from tests.integration.certificates import Certificates, KeyPair
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, binary, wait_until
from tests.integration.operator_rig import (
    ROOT_PASSWORD,
    SECONDS,
    Namespace,
    Operator,
    administers_users,
    alone_in,
)

RETURN_SECONDS = 60.0
"""Far less than the minute between two resyncs, at which the operator would notice as well."""


@pytest.fixture
def etcd_of_users(start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd("3.6", arguments=("--bcrypt-cost=4",))


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> Iterator[Operator]:
    options = administers_users(tmp_path, namespace)
    replica = Operator(tmp_path, api_server, etcd_of_users, options=options)
    with replica.running():
        yield replica


def etcdctl(etcd: EtcdServer, *words: str, user: str = "") -> str:
    """Return the output of etcdctl, in success or failure."""
    login = [f"--user={user}"] if user else []
    done = subprocess.run(
        [str(binary("3.6", "etcdctl")), f"--endpoints={etcd.url}", *login, *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def is_guarded(etcd: EtcdServer) -> bool:
    return "user name is empty" in etcdctl(etcd, "get", "/elasticjob/", "--prefix", "--keys-only")


def test_authentication_is_enabled_before_first_job(
    operator: Operator, etcd_of_users: EtcdServer
) -> None:
    wait_until(lambda: is_guarded(etcd_of_users), "etcd to ask for a user", SECONDS)


def test_job_user_has_access_to_own_keys_only(
    operator: Operator, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    uid = ns.create_job(maxNodes=1)["metadata"]["uid"]
    ns.await_pods("job-0")
    data = ns.present("secrets", "job-elasticjob")["data"]
    login = ":".join(base64.b64decode(data[key]).decode() for key in ("user", "password"))
    own = f"/elasticjob/{namespace}/{uid}/"
    assert own in etcdctl(etcd_of_users, "get", own, "--prefix", "--keys-only", user=login)
    other = etcdctl(etcd_of_users, "get", "/elasticjob/", "--prefix", "--keys-only", user=login)
    assert "permission denied" in other
    assert ROOT_PASSWORD not in base64.b64decode(data["password"]).decode()


def test_finished_job_has_no_user_and_keeps_its_records(
    operator: Operator, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    uid = ns.create_job(maxNodes=1)["metadata"]["uid"]
    ns.await_pods("job-0")
    root = f"root:{ROOT_PASSWORD}"
    assert uid in etcdctl(etcd_of_users, "user", "list", user=root)
    own = f"/elasticjob/{namespace}/{uid}/"
    closed = encode(
        Round(1, RoundState.CLOSED, Cause(CauseKind.START), outcome=Outcome(OutcomeKind.SUCCEEDED))
    )
    etcdctl(etcd_of_users, "put", Keys(f"{own}1/").round, closed.decode(), user=root)
    ns.await_status(phase="Succeeded")
    ns.remove_pod("job-0")

    def left() -> str:
        found = [etcdctl(etcd_of_users, kind, "list", user=root) for kind in ("user", "role")]
        return "".join(found)

    wait_until(lambda: uid not in left(), "the user and the role to be removed", SECONDS)
    assert own in etcdctl(etcd_of_users, "get", own, "--prefix", "--keys-only", user=root)


@pytest.fixture(params=["3.5", "3.6", "3.7"])
def etcd_with_certificates(
    request: pytest.FixtureRequest, start_etcd: StartEtcd, tmp_path: Path
) -> tuple[EtcdServer, dict[str, str], Path]:
    """Return an etcd as the chart starts it, and the operator's options for it."""
    wanted, now = Wanted(frozenset({"localhost", "127.0.0.1"})), datetime.now(UTC)
    data = apply_changes({}, due_changes(parse_data({}), wanted, now), wanted, now)
    folder = tmp_path / "secret"
    folder.mkdir()
    for name, content in data.items():
        (folder / name).write_bytes(content)
    agents = KeyPair(folder / AGENTS_CERT, folder / AGENTS_KEY)
    certificates = Certificates(folder / BUNDLE, KeyPair(folder / CERT, folder / KEY), agents)
    server = start_etcd(
        request.param,
        certificates=certificates,
        client_certificates=True,
        arguments=("--bcrypt-cost=4",),
    )
    options = {
        "ELASTICJOB_ETCD_CA_FILE": str(folder / BUNDLE),
        "ELASTICJOB_ETCD_CERT_FILE": str(folder / OPERATOR_CERT),
        "ELASTICJOB_ETCD_KEY_FILE": str(folder / OPERATOR_KEY),
        "ELASTICJOB_AGENTS_CERT_FILE": str(folder / AGENTS_CERT),
        "ELASTICJOB_AGENTS_KEY_FILE": str(folder / AGENTS_KEY),
        "ELASTICJOB_ETCD_USER_FILE": str(folder / USER),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(folder / "password"),
        "ELASTICJOB_MANAGE_ETCD_USERS": "true",
        "ELASTICJOB_ETCD_EXCLUSIVE": "true",
    }
    return server, options, folder


def test_operator_with_root_certificate_takes_root_back_and_gives_pods_the_agents_certificate(
    etcd_with_certificates: tuple[EtcdServer, dict[str, str], Path],
    tmp_path: Path,
    api_server: ApiServer,
    namespace: str,
) -> None:
    """An agent of a hostile job made itself root while etcd, which lost its data, had no users."""
    etcd, options, folder = etcd_with_certificates
    agents = Tls(folder / BUNDLE, folder / AGENTS_CERT, folder / AGENTS_KEY)

    async def intrude() -> None:
        async with Client([etcd.url], tls=agents, user=ROOT, password="stolen") as client:
            await Users(client).enable_auth()

    def is_refused() -> bool:
        try:
            asyncio.run(intrude())
        except Unauthenticated:
            return True
        return False

    async def own_keys(data: dict[str, str]) -> None:
        text = {key: base64.b64decode(value) for key, value in data.items()}
        assert text["tls.crt"] == (folder / AGENTS_CERT).read_bytes()
        assert text["tls.key"] == (folder / AGENTS_KEY).read_bytes()
        user, password = text["user"].decode(), text["password"].decode()
        async with Client([etcd.url], tls=agents, user=user, password=password) as client:
            await client.range(Range(f"/elasticjob/{namespace}/{user.removeprefix('job-')}/1/x"))
            with pytest.raises(PermissionDenied):
                await client.range(Range("/elasticjob/cluster"))

    asyncio.run(intrude())
    operator = Operator(tmp_path, api_server, etcd, options=options | alone_in(namespace))
    with operator.running():
        ns = Namespace(api_server, namespace)
        ns.create_job(maxNodes=1)
        ns.await_pods("job-0")
        asyncio.run(own_keys(ns.present("secrets", "job-elasticjob")["data"]))
        wait_until(is_refused, "root's password to be set again", SECONDS)


def restore_initial_data(etcd: EtcdServer, scratch: Path) -> None:
    """Give the stopped server the data with which the chart's etcd begins."""
    scratch.mkdir()
    prepare(scratch)
    command = [str(binary(etcd.version, "etcdutl")), "snapshot", "restore"]
    command += [str(scratch / PREPARED)]
    command += ["--skip-hash-check", f"--data-dir={etcd.folder / 'data'}", f"--name={etcd.name}"]
    command += [f"--initial-cluster={etcd.name}={etcd.peer_url}"]
    command += [f"--initial-advertise-peer-urls={etcd.peer_url}"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("etcd_with_certificates", ["3.6", "3.7"], indirect=True)
def test_job_has_its_user_again_after_etcd_returned_with_its_first_data(
    etcd_with_certificates: tuple[EtcdServer, dict[str, str], Path],
    tmp_path: Path,
    api_server: ApiServer,
    namespace: str,
) -> None:
    etcd, options, folder = etcd_with_certificates
    tls = Tls(folder / BUNDLE, folder / AGENTS_CERT, folder / AGENTS_KEY)
    operator = Operator(tmp_path, api_server, etcd, options=options | alone_in(namespace))
    with operator.running():
        ns = Namespace(api_server, namespace)
        ns.create_job(maxNodes=1)
        ns.await_pods("job-0")
        data = ns.present("secrets", "job-elasticjob")["data"]
        user, password = (base64.b64decode(data[key]).decode() for key in ("user", "password"))

        async def read() -> str:
            prefix = f"/elasticjob/{namespace}/{user.removeprefix('job-')}/"
            async with Client([etcd.url], tls=tls, user=user, password=password) as client:
                try:
                    await client.range(Range(prefix, True))
                except EtcdError as error:
                    return str(error)
            return ""

        assert asyncio.run(read()) == ""
        etcd.kill()
        etcd.wipe()
        restore_initial_data(etcd, tmp_path / "scratch")
        etcd.start()
        assert "authentication failed" in asyncio.run(read()), "etcd has no user of the job yet"
        wait_until(lambda: not asyncio.run(read()), "the job's user", RETURN_SECONDS)


def test_authentication_is_restored_after_etcd_data_loss(
    operator: Operator, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    ns.create_job(maxNodes=1)
    ns.await_pods("job-0")
    etcd_of_users.kill()
    etcd_of_users.wipe()
    etcd_of_users.start()
    wait_until(lambda: is_guarded(etcd_of_users), "etcd to ask for a user again", 60.0)


def test_job_that_writes_too_much_loses_its_users_and_records_and_resumes_with_another_password(
    operator: Operator, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> None:
    """Its neighbour's status stays current meanwhile."""
    ns = Namespace(api_server, namespace)
    uid = ns.create_job("bad", maxNodes=1)["metadata"]["uid"]
    ns.create_job("good", maxNodes=1)
    ns.await_pods("bad-0", "good-0")

    def login() -> tuple[str, str]:
        data = ns.present("secrets", "bad-elasticjob")["data"]
        return base64.b64decode(data["user"]).decode(), base64.b64decode(data["password"]).decode()

    user, password = login()
    ns.patch_job({"metadata": {"annotations": {ROTATE_ANNOTATION: "1"}}}, "bad")
    wait_until(lambda: login()[0] == f"{user}.1", "a second user", SECONDS)
    second = login()
    own = f"/elasticjob/{namespace}/{uid}/"
    refused = asyncio.run(flood(etcd_of_users, own, user, password))
    assert refused, "the user was revoked while it wrote"
    ns.await_condition("Stalled", "TooManyRecords", "bad")
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "good")
    ns.await_pods("bad-0")
    root = f"root:{ROOT_PASSWORD}"
    assert etcdctl(etcd_of_users, "get", own, "--prefix", "--keys-only", user=root) == ""
    assert uid not in etcdctl(etcd_of_users, "user", "list", user=root)

    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "bad")
    ns.await_pods()
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}}, "bad")
    ns.await_pods("bad-0")
    wait_until(
        lambda: uid in etcdctl(etcd_of_users, "user", "list", user=root), "a user again", SECONDS
    )
    third = login()
    # A busy operator removes records twice: those that etcd reported after the first removal.
    assert third[0] in (f"{user}.2", f"{user}.3")
    assert len({password, second[1], third[1]}) == 3
    assert third[0] in etcdctl(etcd_of_users, "user", "list", user=root).split()
    for former in (f"{user}:{password}", ":".join(second), f"{third[0]}:{second[1]}"):
        assert "authentication failed" in etcdctl(etcd_of_users, "get", own, user=former)
    etcdctl(etcd_of_users, "put", f"{own}1/x", "y", user=":".join(third))
    assert "y" in etcdctl(etcd_of_users, "get", f"{own}1/x", user=root)


async def flood(etcd: EtcdServer, own: str, user: str, password: str) -> bool:
    """Write keys below a job's folder as fast as possible; return True once that is refused."""
    async with Client([etcd.url], user=user, password=password) as client:
        for first in range(0, 100_000, 100):
            puts = tuple(Put(f"{own}1/junk/{first + n}", b"x" * 200) for n in range(100))
            try:
                await client.txn(Txn((), puts))
            except EtcdError:
                return True
    return False
