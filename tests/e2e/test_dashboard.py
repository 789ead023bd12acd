"""Dashboard of the chart, in the cluster: each viewer reads with the rights of a token."""

from __future__ import annotations

import http.client
import subprocess
from base64 import b64encode
from collections.abc import Iterator

import pytest

from tests.e2e.console import Console, until
from tests.e2e.installation import SYSTEM, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import counting, job

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture
def port(console: Console, installation: Installation) -> Iterator[int]:
    """Yield the local port of a port-forward to the dashboard."""
    rollout = ("rollout", "status", "deployment/elasticjob-dashboard", "--timeout=90s")
    console.kubectl("-n", SYSTEM, *rollout, seconds=100)
    forward = subprocess.Popen(
        [*console.kubectl_command, "-n", SYSTEM, "port-forward",
         "deployment/elasticjob-dashboard", ":8080"],
        stdout=subprocess.PIPE, text=True, env=dict(console.env),
    )  # fmt: skip
    try:
        assert forward.stdout is not None
        line = forward.stdout.readline()  # Forwarding from 127.0.0.1:41017 -> 8080
        yield int(line.split(" -> ")[0].rpartition(":")[2])
    finally:
        forward.terminate()
        forward.communicate(timeout=60)


def answer(port: int, path: str, token: str = "") -> tuple[int, str]:
    """Return status and text of a page."""
    link = http.client.HTTPConnection("localhost", port, timeout=30)
    login = b64encode(f"viewer:{token}".encode()).decode()
    try:
        link.request("GET", path, headers={"Authorization": f"Basic {login}"} if token else {})
        found = link.getresponse()
        return found.status, found.read().decode()
    finally:
        link.close()


def token_of(console: Console, namespace: str, account: str, role: str = "") -> str:
    """Create a service account with this role in its namespace; return a token of it."""
    console.kubectl("-n", namespace, "create", "serviceaccount", account)
    if role:
        subject = f"--serviceaccount={namespace}:{account}"
        binding = ("create", "rolebinding", account, f"--clusterrole={role}", subject)
        console.kubectl("-n", namespace, *binding)
    return console.kubectl("-n", namespace, "create", "token", account, "--duration=10m").strip()


def test_viewer_sees_job_and_logs_and_a_stranger_is_refused(
    ns: JobNamespace, console: Console, port: int
) -> None:
    ns.apply(job("shown", counting(), nodes=2))
    ns.running("shown", 2)
    ns.advances("shown", 2)
    page = f"/jobs/{ns.namespace}/shown/"
    viewer = token_of(console, ns.namespace, "viewer", "view")
    stranger = token_of(console, ns.namespace, "stranger")

    assert answer(port, page)[0] == 401, "without a token"
    status, text = answer(port, page, viewer)
    assert (status, "shown-0" in text) == (200, True)
    until(lambda: "shown-1" in answer(port, f"{page}logs/", viewer)[1], "lines of both pods")
    status, text = answer(port, page, stranger)
    assert (status, "shown-0" in text) == (403, False)
    ns.delete("shown")
    until(lambda: answer(port, page, viewer)[0] == 404, "the page of a deleted job", 60)
