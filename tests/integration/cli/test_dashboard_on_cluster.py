"""Dashboard of a cluster's jobs: real API server, users with different rights, real browser."""

from __future__ import annotations

import base64
import http.client
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticjob_cli.commands.dashboard import local_opener
from elasticjob_cli.dashboard.cluster_jobs import ClusterJobs, by_kubectl
from elasticjob_cli.dashboard.server import LOOPBACK_NAMES, Server
from elasticjob_cli.kubectl import Kubectl
from tests.cluster.programs import programs
from tests.integration.apiserver import ADMIN, NOBODY, ApiServer
from tests.integration.browser import NARROW, browser
from tests.integration.certificates import make_certificates
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob, pod
from tests.integration.local_rig import PYTHONPATH

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}"
READS_JOBS = {"apiGroups": ["elasticjob.dev"], "resources": ["elasticjobs"]}
READS_JOBS |= {"verbs": ["get", "list"]}
READS_LOGS = {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}


@dataclass
class Site:
    """Running dashboard of a cluster."""

    process: subprocess.Popen[str]
    port: int
    tls: ssl.SSLContext | None

    def ask(self, path: str, authorization: str = "", host: str = "") -> tuple[int, str, Any]:
        """Return the status, text and headers of an answer."""
        link: http.client.HTTPConnection
        if self.tls is None:
            link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            link = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)
        headers = {"Authorization": authorization} if authorization else {}
        headers |= {"Host": host} if host else {}
        try:
            link.request("GET", path, headers=headers)
            answer = link.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            link.close()


@contextmanager
def site(server: ApiServer, *options: str, tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Run the program of the chart's Deployment, without a token of its own."""
    words = [sys.executable, "-m", "elasticjob_cli.dashboard.in_cluster", "--port=0"]
    words += [f"--api-server={server.url}", f"--ca-file={server.certificates.ca_file}", *options]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:2] == ["serving", "port"], said
        yield Site(process, int(said[2].rstrip(",")), tls)
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, "ends on SIGTERM by itself"


def account(server: ApiServer, namespace: str, name: str, *rules: dict[str, Any]) -> str:
    """Create a service account with these rights in its namespace; return a token of it."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    server.request("POST", path, {"metadata": {"name": name}})
    rbac = RBAC.format(namespace)
    server.request("POST", f"{rbac}/roles", {"metadata": {"name": name}, "rules": list(rules)})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    server.request("POST", f"{rbac}/rolebindings", binding)
    for rule in rules:
        server.await_right(f"system:serviceaccount:{namespace}:{name}", rule, namespace)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    found = server.request("POST", f"{path}/{name}/token", asked)
    return str(found["status"]["token"])


def add_job(server: ApiServer, namespace: str, name: str) -> None:
    """Create a job that has failed once, with a pod that runs."""
    jobs = ELASTICJOBS_PATH.format(namespace)
    made = server.request("POST", jobs, elasticjob(name))
    failure = {"round": 1, "pod": f"{name}-0", "class": "UserError", "exitCode": 1}
    failure |= {"message": "<b>wrong shape</b>", "traceback": f"Traceback of {name}"}
    rounds = [
        {"round": 1, "cause": "start", "nodes": 1, "finalTime": "2026-11-24T05:00:00Z"},
        {"round": 2, "cause": "failure", "members": [f"{name}-0"], "nodes": 1, "lostSteps": 7,
         "finalTime": "2026-11-24T05:00:30Z", "startMs": 400, "recoveryMs": 400},
    ]  # fmt: skip
    status = {"phase": "Running", "rounds": rounds, "firstFailure": failure}
    status |= {"explanation": [f"{name} trains on 1 node."]}
    server.patch(f"{jobs}/{name}/status", {"status": status})
    runs = pod(f"{name}-0")
    runs["metadata"]["labels"]["elasticjob.dev/job-uid"] = made["metadata"]["uid"]
    pods = f"/api/v1/namespaces/{namespace}/pods"
    server.request("POST", pods, runs)
    server.patch(f"{pods}/{name}-0/status", {"status": {"phase": "Running"}})


@pytest.fixture
def teams(api_server: ApiServer, namespace: str) -> tuple[str, str]:
    """Return two namespaces with a job each."""
    other = api_server.namespace(f"other-{namespace[-20:]}")
    add_job(api_server, namespace, "alpha")
    add_job(api_server, other, "beta")
    return namespace, other


def password(token: str) -> str:
    return "Basic " + base64.b64encode(f"viewer:{token}".encode()).decode()


def test_each_viewer_reads_with_the_rights_of_the_own_token(
    api_server: ApiServer, teams: tuple[str, str], tmp_path: Path
) -> None:
    one, other = teams
    ann = account(api_server, one, "ann", READS_JOBS, READS_LOGS)
    bob = account(api_server, other, "bob", READS_JOBS)
    alpha, beta = f"/jobs/{one}/alpha/", f"/jobs/{other}/beta/"
    with site(api_server) as page:
        status, _, headers = page.ask("/")
        assert (status, headers["WWW-Authenticate"].split()[0]) == (401, "Basic")
        for wrong in ("Bearer wrong", password("wrong"), password("x y"), "Basic ="):
            status, text, headers = page.ask(alpha, wrong)
            assert (status, "WWW-Authenticate" in headers) == (401, True)
            assert "alpha trains" not in text
        assert page.ask("/healthz", host="10.0.0.1:8080")[0] == 200
        assert page.ask("/", f"Bearer {ann}", host="evil.example")[0] == 421

        status, text, _ = page.ask("/", password(ann))
        assert (status, 'name="namespace"' in text, "alpha" in text) == (200, True, False)
        assert 'href="../../jobs/' in page.ask(f"/namespaces/{one}/", f"Bearer {ann}")[1]
        status, text, _ = page.ask(alpha, f"Bearer {ann}")
        assert status == 200
        assert "alpha trains on 1 node." in text
        assert "Traceback of alpha" in text
        assert "&lt;b&gt;wrong shape&lt;/b&gt;" in text
        assert "0.4 s, 7 steps lost" in text
        assert "[elasticjob] no log: " in text  # no kubelet runs beside this API server
        for path in (beta, f"{beta}logs/", f"/namespaces/{other}/"):
            status, text, _ = page.ask(path, password(ann))
            assert (status, "beta trains" in text) == (403, False)
            assert "cannot" in text

        status, text, _ = page.ask(beta, password(bob))
        assert (status, "beta trains on 1 node." in text) == (200, True)
        assert "cannot list resource &quot;pods&quot;" in text
        assert page.ask(f"{beta}logs/", password(bob))[0] == 403
        assert page.ask(alpha, password(bob))[0] == 403

        text = page.ask("/", f"Bearer {ADMIN}-token")[1]
        assert "alpha" in text
        assert "beta" in text
        assert page.ask(f"/jobs/{one}/absent/", f"Bearer {ann}")[0] == 404

        with browser() as tab:
            tab.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {ann}"})
            tab.look(NARROW)
            tab.open(f"http://localhost:{page.port}{alpha}")
            tab.until("Number(document.querySelector('#live').dataset.count || 0) >= 1")
            assert "Traceback of alpha" in tab.text()
            assert tab.evaluate("document.documentElement.scrollWidth") == NARROW[0]
            assert tab.said == []


def test_certificate_encrypts_and_its_renewal_is_noticed(
    api_server: ApiServer, teams: tuple[str, str], tmp_path: Path
) -> None:
    made = api_server.certificates.server
    (tmp_path / "tls.crt").write_bytes(made.cert_file.read_bytes())
    (tmp_path / "tls.key").write_bytes(made.key_file.read_bytes())
    tls = ssl.create_default_context(cafile=str(api_server.certificates.ca_file))
    options = (f"--tls-folder={tmp_path}", "--host=jobs.example.org")
    with site(api_server, *options, tls=tls) as page:
        admin = f"Bearer {ADMIN}-token"
        assert "alpha" in page.ask("/", admin, host="jobs.example.org")[1]
        plain = Site(page.process, page.port, None)
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.ask("/", admin)
        assert page.ask("/", admin)[0] == 200
        (tmp_path / "tls.crt").write_text("no certificate")
        assert page.ask("/", admin)[0] == 200  # with the former one

        other = make_certificates(tmp_path / "renewed")
        (tmp_path / "tls.key").write_bytes(other.server.key_file.read_bytes())
        (tmp_path / "tls.crt").write_bytes(other.server.cert_file.read_bytes())
        with pytest.raises(ssl.SSLCertVerificationError):
            page.ask("/", admin)
        renewed = ssl.create_default_context(cafile=str(other.ca_file))
        assert Site(page.process, page.port, renewed).ask("/", admin)[0] == 200


def test_kubectl_reads_with_its_users_rights(
    api_server: ApiServer, teams: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = teams
    monkeypatch.setenv("PATH", f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}")
    rbac = RBAC.format(one)
    role = {"metadata": {"name": "reads"}, "rules": [READS_JOBS]}
    api_server.request("POST", f"{rbac}/roles", role)
    named = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NOBODY}
    binding = {"metadata": {"name": "reads"}, "roleRef": named, "subjects": [subject]}
    api_server.request("POST", f"{rbac}/rolebindings", binding)
    api_server.await_right(NOBODY, READS_JOBS, one)
    for user, statuses in ((ADMIN, [200, 200, 200, 404]), (NOBODY, [200, 200, 403, 404])):
        source = ClusterJobs(by_kubectl(Kubectl(None, None, api_server.kubeconfig(user))))
        with Server(("127.0.0.1", 0), local_opener(source, "t"), LOOPBACK_NAMES) as served:
            thread = threading.Thread(target=served.serve_forever, args=(0.01,))
            thread.start()
            page = Site(None, served.port, None)  # type: ignore[arg-type]
            paths = ["", f"jobs/{one}/alpha/", f"jobs/{other}/beta/", f"jobs/{one}/absent/"]
            answers = [page.ask(f"/t/{path}") for path in paths]
            served.shutdown()
            thread.join()
        assert [status for status, _, _ in answers] == statuses
        assert ("beta" in answers[0][1]) == (user == ADMIN)
        assert "alpha trains on 1 node." in answers[1][1]
