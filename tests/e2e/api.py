"""Client of the cluster's API that starts no program for each request.

Tests look several times a second, and a process of kubectl needs more processor time for each look
than the cluster does. `kubectl proxy` handles authentication.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

Json = dict[str, Any]

REQUEST_SECONDS = 15.0
WATCH_SECONDS = 3600.0
NOT_FOUND = 404
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_GROUPS = {
    "customresourcedefinitions": "apis/apiextensions.k8s.io/v1",
    "elasticjobs": "apis/elasticjob.dev/v1alpha1",
    "leases": "apis/coordination.k8s.io/v1",
    "networkpolicies": "apis/networking.k8s.io/v1",
    "poddisruptionbudgets": "apis/policy/v1",
}
"""API group and version of each resource outside the core group."""


class Refused(Exception):
    """Request that the API server refused, or did not answer in time: its status is 0 then."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ProxyEnded(Exception):
    """Lack of a `kubectl proxy`; not a `Refused`, which callers take for a short failure."""


@dataclass(frozen=True, slots=True)
class Api:
    """API client through the `kubectl proxy` at this address."""

    address: str

    def find(self, resource: str, name: str, namespace: str = "") -> Json | None:
        """Return an object, None if there is none. `resource` is the plural, such as `pods`."""
        try:
            return self.json("GET", f"{_path(resource, namespace)}/{name}")
        except Refused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def items(
        self, resource: str, namespace: str = "", labels: str = "", fields: str = ""
    ) -> list[Json]:
        """Return the objects of a namespace, or of all, with these selectors."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = urlencode({name: text for name, text in selectors.items() if text})
        found: list[Json] = self.json("GET", f"{_path(resource, namespace)}?{query}")["items"]
        return found

    def log(
        self, namespace: str, pod: str, options: Mapping[str, str], seconds: float = REQUEST_SECONDS
    ) -> str:
        """Return a container's log; `options` are parameters of the API, such as `tailLines`."""
        path = f"{_path('pods', namespace)}/{pod}/log?{urlencode(options)}"
        return self.text("GET", path, seconds=seconds)

    def annotate(self, resource: str, name: str, namespace: str, **annotations: str) -> None:
        body = {"metadata": {"annotations": annotations}}
        self.json("PATCH", f"{_path(resource, namespace)}/{name}", body)

    def text(
        self, method: str, path: str, body: Json | None = None, seconds: float = REQUEST_SECONDS
    ) -> str:
        """Return the response's text. A PATCH is a merge patch."""
        try:
            with self._open(method, path, body, seconds) as answer:
                content: bytes = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Refused(f"{method} {path}: {error}") from error
        return content.decode(errors="replace")

    def json(self, method: str, path: str, body: Json | None = None) -> Json:
        found: Json = json.loads(self.text(method, path, body))
        return found

    def lines(self, path: str) -> Iterator[str]:
        """Yield the lines of a streamed response."""
        with self._open("GET", path, None, WATCH_SECONDS) as answer:
            for line in answer:
                yield line.decode()

    def _open(self, method: str, path: str, body: Json | None, seconds: float) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            f"http://{self.address}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": kind},
        )
        try:
            return _DIRECT.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:300]
            raise Refused(f"{method} {path}: {said}", error.code) from error
        except OSError as error:
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                raise ProxyEnded(f"nothing listens at {self.address}: {error}") from error
            raise Refused(f"{method} {path}: {error}") from error


def _path(resource: str, namespace: str) -> str:
    group = _GROUPS.get(resource, "api/v1")
    return f"/{group}/namespaces/{namespace}/{resource}" if namespace else f"/{group}/{resource}"


@contextmanager
def served(kubectl_command: tuple[str, ...], env: Mapping[str, str]) -> Iterator[Api]:
    """Yield a client for the block, through a `kubectl proxy` that ends with it."""
    command = ["setpriv", "--pdeathsig", "KILL", *kubectl_command, "proxy", "--port=0"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()  # Starting to serve on 127.0.0.1:37165
            if not words:
                raise ProxyEnded(f"exit code {process.wait()} of {' '.join(command)}")
            yield Api(words[-1])
        finally:
            process.kill()
