"""Rotation of a job's etcd user: by annotation and by age, with a restart of the operator."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elasticjob_operator.domain.manifests.names import (
    CREDENTIALS_SINCE_ANNOTATION,
    ROTATE_ANNOTATION,
    ROTATED_ANNOTATION,
)
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import (
    ROOT_PASSWORD,
    SECONDS,
    Namespace,
    Operator,
    administers_users,
)

SECRET = "job-elasticjob"


@pytest.fixture
def etcd(start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd("3.6", arguments=("--bcrypt-cost=4",))


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> Iterator[Operator]:
    options = administers_users(tmp_path, namespace)
    with Operator(tmp_path, api_server, etcd, options=options).running() as replica:
        yield replica


def login(ns: Namespace) -> tuple[str, str]:
    data = ns.present("secrets", SECRET)["data"]
    return base64.b64decode(data["user"]).decode(), base64.b64decode(data["password"]).decode()


def users(etcd: EtcdServer) -> set[str]:
    return {*etcd.ctl("user", "list", user=f"root:{ROOT_PASSWORD}").split()} - {"root"}


def request(ns: Namespace, value: str) -> None:
    ns.patch_job({"metadata": {"annotations": {ROTATE_ANNOTATION: value}}})


def backdate(ns: Namespace, age: timedelta) -> None:
    """Write into the Secret that its user is of this age."""
    since = (datetime.now(UTC) - age).isoformat(timespec="seconds")
    body = {"metadata": {"annotations": {CREDENTIALS_SINCE_ANNOTATION: since}}}
    ns.server.patch(ns.path("secrets", SECRET), body)


def await_users(etcd: EtcdServer, *names: str) -> None:
    wait_until(lambda: users(etcd) == {*names}, f"users {names}", SECONDS)


def test_annotation_rotates_the_user_once_and_the_former_one_goes_later(
    operator: Operator, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    name = f"job-{ns.create_job(nodes=1, maxNodes=2)['metadata']['uid']}"
    ns.await_pods("job-0")
    first = login(ns)
    assert first[0] == name
    pod = ns.present("pods", "job-0")["metadata"]["uid"]

    request(ns, "1")
    message = f"gave the job's agents new credentials, those of etcd's user {name}.1: annotation "
    ns.await_event("CredentialsRotated", f"{message}{ROTATE_ANNOTATION} was set or changed")
    second = login(ns)
    assert second[0] == f"{name}.1"
    assert second[1] != first[1]
    for user, password in (first, second):
        etcd.ctl("get", f"/elasticjob/{namespace}/{name[4:]}/1/x", user=f"{user}:{password}")
    annotations = ns.present("secrets", SECRET)["metadata"]["annotations"]
    assert annotations[ROTATED_ANNOTATION] == "1"
    # A new process knows that it was handled, and keeps the former user for its time.
    operator.close()
    operator.start()
    request(ns, "2")
    ns.scale(2)
    ns.await_pods("job-0", "job-1")
    operator.close()
    assert login(ns) == second
    assert users(etcd) == {name, f"{name}.1"}
    # Its time is over: the former user goes, and the waiting request is handled.
    backdate(ns, timedelta(minutes=11))
    operator.start()
    await_users(etcd, f"{name}.1", f"{name}.2")
    wait_until(lambda: login(ns)[0] == f"{name}.2", "the Secret to name the user", SECONDS)
    assert ns.present("pods", "job-0")["metadata"]["uid"] == pod

    def rotations() -> int:
        return len([one for one in ns.events() if one[0] == "CredentialsRotated"])

    wait_until(lambda: rotations() >= 2, "an event for each rotation", SECONDS)
    assert rotations() == 2


def test_user_is_rotated_by_age_and_deleted_with_the_job(
    operator: Operator, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    name = f"job-{ns.create_job(nodes=1, maxNodes=2)['metadata']['uid']}"
    ns.await_pods("job-0")
    backdate(ns, timedelta(days=31))
    operator.close()
    operator.start()
    ns.scale(2)  # the Secret is checked before a pod is created
    ns.await_pods("job-0", "job-1")
    message = f"gave the job's agents new credentials, those of etcd's user {name}.1: "
    ns.await_event("CredentialsRotated", f"{message}their maximum age was reached")
    assert users(etcd) == {name, f"{name}.1"}
    assert login(ns)[0] == f"{name}.1"
