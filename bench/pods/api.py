"""Client of the cluster's API that starts no program per request, since faults are timed."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.pods.seen import Life
from tests.e2e.console import Console

REQUEST_SECONDS = 15.0
WATCH_SECONDS = 3600
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Json = dict[str, Any]


class Refused(Exception):
    """Request that the API server refused, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Api:
    """API client through `kubectl proxy`, which handles authentication."""

    address: str

    def text(self, method: str, path: str, body: Json | None = None) -> str:
        """Return the response's text. A PATCH is a merge patch."""
        with self._open(method, path, body, REQUEST_SECONDS) as answer:
            content: bytes = answer.read()
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
                raise Refused(f"{method} {path}: {error.read().decode()[:300]}") from error
        except OSError as error:
            raise Refused(f"{method} {path}: {error}") from error


@contextlib.contextmanager
def api(console: Console) -> Iterator[Api]:
    with console.start("proxy", "--port=0") as process:
        try:
            assert process.stdout is not None
            # Starting to serve on 127.0.0.1:37165
            yield Api(process.stdout.readline().split()[-1])
        finally:
            process.kill()


@dataclass
class Lives:
    """Times at which each pod of a namespace was first seen created and scheduled, by uid."""

    api: Api
    namespace: str
    lives: dict[str, Life] = field(default_factory=dict)

    def begin(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def of(self, uid: str) -> Life:
        return self.lives.get(uid, Life())

    def _follow(self) -> None:
        # The proxy ends before this does.
        with contextlib.suppress(Refused, OSError, http.client.HTTPException):
            for line in self.api.lines(f"/api/v1/namespaces/{self.namespace}/pods?watch=true"):
                self.take(time.time(), json.loads(line)["object"])

    def take(self, at: float, pod: Json) -> None:
        seen = self.lives.setdefault(pod["metadata"].get("uid", ""), Life()).seen
        seen.setdefault("created", at)
        if pod.get("spec", {}).get("nodeName"):
            seen.setdefault("scheduled", at)
