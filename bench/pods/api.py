"""Times of pods, followed through the cluster's API, since faults are timed."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass, field

from bench.pods.seen import Life
from tests.e2e.api import Api, Json, Refused


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
