"""Jobs that name an etcd of their own, if the chart permits it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in


@pytest.fixture
def other_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "other")
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def here(
    tmp_path: Path,
    api_server: ApiServer,
    newest_etcd: EtcdServer,
    other_etcd: EtcdServer,
    namespace: str,
) -> Iterator[Namespace]:
    options = {
        **alone_in(namespace),
        "ELASTICJOB_ALLOWED_ENDPOINTS": other_etcd.url,
    }
    replica = Operator(tmp_path, api_server, newest_etcd, options=options)
    with replica.running():
        yield Namespace(api_server, namespace)


def bounds_key(here: Namespace) -> str:
    return f"/elasticjob/{here.name}/{here.job()['metadata']['uid']}/1/state/bounds"


def test_job_uses_its_own_etcd(
    here: Namespace, newest_etcd: EtcdServer, other_etcd: EtcdServer
) -> None:
    here.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url]})
    here.await_pods("job-0")
    assert other_etcd.ctl("get", bounds_key(here))
    assert not newest_etcd.ctl("get", bounds_key(here))
    pod = here.get("pods", "job-0")
    assert pod is not None
    assert other_etcd.url in str(pod["spec"]["initContainers"])
    here.await_status(phase="Pending", pods=1)
    assert here.status()["rendezvous"]["state"] == "joinable"
    here.server.request("DELETE", here.path("elasticjobs", "job"))
    prefix = f"/elasticjob/{here.name}/"
    wait_until(
        lambda: "Deleted" in other_etcd.ctl("get", "--prefix", prefix), "a closed round", SECONDS
    )


def test_missing_etcd_secret_is_awaited_and_copied(here: Namespace, other_etcd: EtcdServer) -> None:
    wanted = {"endpoints": [other_etcd.url], "secretName": "mine"}
    here.create_job(maxNodes=1, rendezvous=wanted)
    found = here.await_condition("PodsReady", "EndpointNotAllowed")
    assert "there must be a Secret mine" in found["message"]
    given = {"metadata": {"name": "mine"}, "data": {"username": "bWU=", "password": "c2VjcmV0"}}
    here.server.request("POST", here.path("secrets"), given)
    here.await_pods("job-0")
    secret = here.get("secrets", "job-elasticjob")
    assert secret is not None
    assert (secret["data"]["user"], secret["data"]["password"]) == ("bWU=", "c2VjcmV0")
    assert secret["data"]["job-key"]


def test_corrected_password_is_read_again(here: Namespace, other_etcd: EtcdServer) -> None:
    for words in (
        ("user", "add", "root:right"),
        ("user", "grant-role", "root", "root"),
        ("auth", "enable"),
    ):
        other_etcd.ctl(*words)
    given = {"username": secret_text("root"), "password": secret_text("wrong")}
    body = {"metadata": {"name": "mine"}, "data": given}
    here.server.request("POST", here.path("secrets"), body)
    here.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url], "secretName": "mine"})
    wait_until(lambda: unknown(here), "Unknown", 2 * SECONDS)
    assert here.pods() == []
    right = {"data": {"password": secret_text("right")}}
    here.server.patch(here.path("secrets", "mine"), right)
    here.patch_job({"metadata": {"annotations": {"note": "corrected"}}})
    wait_until(lambda: here.pods() == ["job-0"], "its pod", 2 * SECONDS)
    secret = here.get("secrets", "job-elasticjob")
    assert secret is not None
    assert secret["data"]["password"] == secret_text("right"), "its agents are given it too"


def secret_text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def unknown(here: Namespace) -> bool:
    return bool((here.status().get("rendezvous") or {}).get("state") == "Unknown")


def test_recreated_job_does_not_wait_for_etcd_of_predecessor(
    here: Namespace, other_etcd: EtcdServer
) -> None:
    """The job's author may have chosen another etcd because the first one is dead."""
    here.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url]})
    here.await_pods("job-0")
    here.await_status(pods=1)
    other_etcd.kill()
    wait_until(lambda: here.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)
    here.server.request("DELETE", here.path("elasticjobs", "job"))
    for plural, name in (
        ("services", "job"),
        ("secrets", "job-elasticjob"),
        ("poddisruptionbudgets", "job"),
    ):
        here.server.request("DELETE", here.path(plural, name))
    here.create_job(maxNodes=1)
    here.await_pods("job-0", "job-1")
    here.await_status(pods=1)
