"""Real Kubernetes API server for tests, with an etcd of its own and no other part of a cluster.

There are no controllers and no kubelets: objects stay as a test creates them, and a pod never runs.
Admission, validation, RBAC and quota are the server's own. Like an etcd of the tests, it dies with
the test process in every case, and is signalled by its pid alone.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from elasticjob_operator.kubernetes.client import Kube
from elasticjob_operator.model.crdgen import DEFAULT_FILE
from tests.cluster.kind import GARBAGE_COLLECTION
from tests.cluster.programs import programs
from tests.integration.certificates import Certificates, make_certificates
from tests.integration.etcd_server import EtcdServer, Ports, stop, wait_until
from tests.paths import ROOT

Json = dict[str, Any]

ADMIN = "admin"
CRD = ROOT / DEFAULT_FILE
NOBODY = "nobody"  # authenticated, without rights until a test binds it to a role

OPERATOR = "system:serviceaccount:elasticjob-system:elasticjob-operator"
"""Service account of a release with the usual names."""

BINDER = "system:serviceaccount:elasticjob-system:elasticjob-binder"
"""Service account of its binder."""

_GROUPS = {ADMIN: "system:masters", NOBODY: "", OPERATOR: "", BINDER: ""}
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_HTTP_SECONDS = 40.0


class Refused(Exception):
    """Refusal of a raw request: its HTTP status and its message."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(f"{status}: {body.get('message', body)}")
        self.status = status
        self.body = body


@dataclass
class ApiServer:
    """API server process. `request` talks to it without any product code."""

    folder: Path
    ports: Ports = field(default_factory=lambda: Ports(1))
    process: subprocess.Popen[bytes] | None = None
    collection: Mapping[str, str] = field(default_factory=lambda: GARBAGE_COLLECTION)
    warnings: list[str] = field(default_factory=list)  # of the last answer

    def __post_init__(self) -> None:
        self.certificates: Certificates = make_certificates(self.folder / "certificates")
        self.etcd = EtcdServer(self.folder / "etcd")
        self._tls = ssl.create_default_context(cafile=self.certificates.ca_file)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports.numbers[0]}"

    @property
    def log(self) -> Path:
        return self.folder / "kube-apiserver.log"

    def start(self) -> ApiServer:
        self.etcd.start()
        self.launch()
        self.wait_ready()
        self._define_elasticjobs()
        return self

    def launch(self) -> None:
        """Start the process, without waiting for it to serve."""
        tokens = self.folder / "tokens.csv"
        tokens.write_text(
            "".join(
                f'{user}-token,{user},{user}-uid,"{group}"\n' for user, group in _GROUPS.items()
            )
        )
        key = self.certificates.server.key_file
        options = {
            "etcd-servers": self.etcd.url,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": str(self.ports.numbers[0]),
            "endpoint-reconciler-type": "none",  # no address for clients to discover
            "service-cluster-ip-range": "10.96.0.0/16",
            "tls-cert-file": str(self.certificates.server.cert_file),
            "tls-private-key-file": str(key),
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": str(key),
            "service-account-key-file": str(self.certificates.server.cert_file),
            "token-auth-file": str(tokens),
            "authorization-mode": "RBAC",
            # The plug-in requires in each namespace the service account that a controller would
            # create.
            "disable-admission-plugins": "ServiceAccount",
            "profiling": "false",
        }
        binary = programs("kubernetes") / "kube-apiserver"
        command = ["setpriv", "--pdeathsig", "KILL", str(binary)]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.collection},
            )

    def wait_ready(self) -> None:
        try:
            wait_until(self.ready, f"the API server at {self.url}", _START_SECONDS)
        except (TimeoutError, ChildProcessError) as error:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise AssertionError(f"{error}; its log ends with:\n{tail}") from error

    def ready(self) -> bool:
        """Return True if the server reports readiness."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise ChildProcessError(f"kube-apiserver ended with {self.process.returncode}")
        try:
            return self.fetch("GET", "/readyz") == b"ok"
        except (Refused, OSError):
            return False

    def warned(self, method: str, path: str, body: Json) -> tuple[Json, list[str]]:
        """Send a raw request and return the answer's JSON and its warnings."""
        answer = self.fetch(method, path, body)
        return json.loads(answer), self.warnings

    def fetch(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        user: str = ADMIN,
    ) -> bytes:
        """Send a raw request, as administrator unless named. Raise Refused."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {user}-token",
                "Content-Type": content_type,
                "Accept": accept,
            },
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_HTTP_SECONDS, context=self._tls) as reply:
                found: bytes = reply.read()
                warnings = reply.headers.get_all("Warning") or ()
                self.warnings = [one.replace('\\"', '"') for one in warnings]
                return found
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()
            try:
                raise Refused(error.code, json.loads(said)) from None
            except ValueError:
                raise Refused(error.code, {"message": said.decode(errors="replace")}) from None

    def request(self, method: str, path: str, body: Json | None = None, **options: str) -> Json:
        """Send a raw request and return the answer's JSON."""
        found: Json = json.loads(self.fetch(method, path, body, **options))
        return found

    def patch(self, path: str, body: Json) -> Json:
        """Apply a merge patch."""
        return self.request("PATCH", path, body, content_type="application/merge-patch+json")

    def namespace(self, name: str) -> str:
        """Create a namespace and return its name."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def await_right(self, user: str, rule: Json, namespace: str) -> None:
        """Wait until the user has the right of this rule: the server's view of new roles and
        bindings lags behind."""
        asked = {
            "namespace": namespace,
            "group": rule["apiGroups"][0],
            "resource": rule["resources"][0],
            "verb": rule["verbs"][0],
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked},
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        wait_until(
            lambda: self.request("POST", path, review)["status"]["allowed"],
            f"the right of {user} to {asked}",
        )

    def kubeconfig(self, user: str = ADMIN, url: str = "") -> Path:
        """Return a kubeconfig with one context, `test`, for this user; `url` is that of a proxy."""
        path = self.folder / f"{user.replace(':', '-')}{url.rpartition(':')[2]}.kubeconfig"
        cluster = {"cluster": "test", "user": user}
        ca, url = str(self.certificates.ca_file), url or self.url
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": cluster}],
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": url, "certificate-authority": ca},
                }
            ],
            "users": [{"name": user, "user": {"token": f"{user}-token"}}],
        }
        text = yaml.safe_dump(document)
        if not path.exists() or path.read_text() != text:
            # At once: a program that was given the same file may be reading it.
            fresh = path.with_name(f"{path.name}.{threading.get_ident()}")
            fresh.write_text(text)
            fresh.replace(path)
        return path

    def connect(
        self, user: str = ADMIN, call_seconds: float = 10.0
    ) -> AbstractAsyncContextManager[Kube]:
        """Return a client of the product for this user."""
        return Kube.connect(self.kubeconfig(user), call_seconds=call_seconds)

    def _define_elasticjobs(self) -> None:
        definition = yaml.safe_load(CRD.read_text())
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.request("POST", path, definition)
        group, version = definition["spec"]["group"], definition["spec"]["versions"][0]["name"]

        def served() -> bool:
            try:
                self.fetch("GET", f"/apis/{group}/{version}/elasticjobs")
            except Refused:
                return False
            return True

        wait_until(served, "ElasticJobs to be served")

    def pause(self) -> None:
        """Stop the process; return when none of its threads runs any more."""
        assert self.process is not None
        stop(self.process.pid)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; `launch` restarts it on the same data and port."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(_STOP_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None, "the server was not started"
        os.kill(self.process.pid, number)

    def close(self) -> None:
        """End both processes, in any state, and release their ports."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.etcd.close()
        self.ports.close()
