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
def ns(
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


def bounds_key(ns: Namespace) -> str:
    return f"/elasticjob/{ns.name}/{ns.job()['metadata']['uid']}/1/state/bounds"


def test_job_uses_its_own_etcd(
    ns: Namespace, newest_etcd: EtcdServer, other_etcd: EtcdServer
) -> None:
    ns.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url]})
    ns.await_pods("job-0")
    assert other_etcd.ctl("get", bounds_key(ns))
    assert not newest_etcd.ctl("get", bounds_key(ns))
    pod = ns.get("pods", "job-0")
    assert pod is not None
    assert other_etcd.url in str(pod["spec"]["initContainers"])
    ns.await_status(phase="Pending", pods=1)
    assert ns.status()["rendezvous"]["state"] == "joinable"
    ns.server.request("DELETE", ns.path("elasticjobs", "job"))
    prefix = f"/elasticjob/{ns.name}/"
    wait_until(
        lambda: "Deleted" in other_etcd.ctl("get", "--prefix", prefix), "a closed round", SECONDS
    )


def test_missing_etcd_secret_is_awaited_and_copied(ns: Namespace, other_etcd: EtcdServer) -> None:
    wanted = {"endpoints": [other_etcd.url], "secretName": "mine"}
    ns.create_job(maxNodes=1, rendezvous=wanted)
    found = ns.await_condition("PodsReady", "SecretUnusable")
    assert "there must be a Secret mine" in found["message"]
    given = {"metadata": {"name": "mine"}, "data": {"username": "bWU=", "password": "c2VjcmV0"}}
    ns.server.request("POST", ns.path("secrets"), given)
    ns.await_pods("job-0")
    secret = ns.get("secrets", "job-elasticjob")
    assert secret is not None
    assert (secret["data"]["user"], secret["data"]["password"]) == ("bWU=", "c2VjcmV0")
    assert secret["data"]["job-key"]


def test_corrected_password_is_read_again(ns: Namespace, other_etcd: EtcdServer) -> None:
    for words in (
        ("user", "add", "root:right"),
        ("user", "grant-role", "root", "root"),
        ("auth", "enable"),
    ):
        other_etcd.ctl(*words)
    given = {"username": secret_text("root"), "password": secret_text("wrong")}
    body = {"metadata": {"name": "mine"}, "data": given}
    ns.server.request("POST", ns.path("secrets"), body)
    ns.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url], "secretName": "mine"})
    wait_until(lambda: unknown(ns), "Unknown", 2 * SECONDS)
    assert ns.pods() == []
    right = {"data": {"password": secret_text("right")}}
    ns.server.patch(ns.path("secrets", "mine"), right)
    ns.patch_job({"metadata": {"annotations": {"note": "corrected"}}})
    wait_until(lambda: ns.pods() == ["job-0"], "its pod", 2 * SECONDS)
    secret = ns.get("secrets", "job-elasticjob")
    assert secret is not None
    assert secret["data"]["password"] == secret_text("right"), "its agents are given it too"


def secret_text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def unknown(ns: Namespace) -> bool:
    return bool((ns.status().get("rendezvous") or {}).get("state") == "Unknown")


def test_recreated_job_does_not_wait_for_etcd_of_predecessor(
    ns: Namespace, other_etcd: EtcdServer
) -> None:
    """The job's author may have chosen another etcd because the first one is dead."""
    ns.create_job(maxNodes=1, rendezvous={"endpoints": [other_etcd.url]})
    ns.await_pods("job-0")
    ns.await_status(pods=1)
    other_etcd.kill()
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)
    ns.server.request("DELETE", ns.path("elasticjobs", "job"))
    for plural, name in (
        ("services", "job"),
        ("secrets", "job-elasticjob"),
        ("poddisruptionbudgets", "job"),
    ):
        ns.server.request("DELETE", ns.path(plural, name))
    ns.create_job(maxNodes=1)
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=1)
