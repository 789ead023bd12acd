"""Authentication in etcd: enabled once each job has a user there."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.kv import Put, Txn
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, binary, wait_until
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in

PASSWORD = "the-root-password"


@pytest.fixture
def etcd_of_users(start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd("3.6", arguments=("--bcrypt-cost=4",))


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> Iterator[Operator]:
    for name, text in (("user", "root"), ("password", PASSWORD)):
        (tmp_path / name).write_text(text)
    options = {
        "ELASTICJOB_ETCD_USER_FILE": str(tmp_path / "user"),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(tmp_path / "password"),
        "ELASTICJOB_MANAGE_ETCD_USERS": "true",
        **alone_in(namespace),
    }
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
        timeout=30,
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
    assert PASSWORD not in base64.b64decode(data["password"]).decode()


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


def test_job_whose_user_writes_too_much_loses_its_user_and_its_records(
    operator: Operator, api_server: ApiServer, etcd_of_users: EtcdServer, namespace: str
) -> None:
    """Its neighbour's status stays current meanwhile."""
    ns = Namespace(api_server, namespace)
    uid = ns.create_job("bad", maxNodes=1)["metadata"]["uid"]
    ns.create_job("good", maxNodes=1)
    ns.await_pods("bad-0", "good-0")
    data = ns.present("secrets", "bad-elasticjob")["data"]
    user, password = (base64.b64decode(data[key]).decode() for key in ("user", "password"))
    own = f"/elasticjob/{namespace}/{uid}/"
    refused = asyncio.run(flood(etcd_of_users, own, user, password))
    assert refused, "the user was revoked while it wrote"
    ns.await_condition("Stalled", "TooManyRecords", "bad")
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "good")
    ns.await_pods("bad-0")
    root = f"root:{PASSWORD}"
    assert etcdctl(etcd_of_users, "get", own, "--prefix", "--keys-only", user=root) == ""
    assert uid not in etcdctl(etcd_of_users, "user", "list", user=root)

    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "bad")
    ns.await_pods()
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}}, "bad")
    ns.await_pods("bad-0")
    wait_until(
        lambda: uid in etcdctl(etcd_of_users, "user", "list", user=root), "a user again", SECONDS
    )


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
