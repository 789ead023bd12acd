"""kopf handlers: turn watch events into wake-ups of the work queue. No decisions, no writes.

Only kopf's watches are used: no finalizers, annotations, events, timers or peering.
"""

from __future__ import annotations

from typing import Any

import kopf

from elasticjob_operator.core.names import JOB_LABEL, UID_LABEL
from elasticjob_operator.delivered import Delivered
from elasticjob_operator.jobs import JobKey, Jobs
from elasticjob_operator.kube import ELASTICJOBS, NODES, PODS, Json, Kind
from elasticjob_operator.nodes import Nodes
from elasticjob_operator.wakeups import Wakeups

COALESCE_SECONDS = 0.02
"""Delay that merges simultaneous events, such as those of a drained node's pods."""
PATIENT_SECONDS = 0.25
"""Delay for events of starting pods, which arrive one by one and require no action."""
WATCH_SECONDS = 300
"""Server-side timeout of a watch, after which it resumes at its last version."""
SILENCE_SECONDS = 90.0
"""Inactivity timeout of a watch; the API server sends a bookmark every minute."""


class Handlers:
    """Event handlers of the watches."""

    def __init__(self, jobs: Jobs, nodes: Nodes, delivered: Delivered, wakeups: Wakeups) -> None:
        self._jobs = jobs
        self._nodes = nodes
        self._delivered = delivered
        self._wakeups = wakeups

    async def job(self, event: Any, **_: Any) -> None:
        raw = self._took(ELASTICJOBS, event)
        key = JobKey(raw["metadata"]["namespace"], raw["metadata"]["name"])
        memory = self._jobs.find(key)
        if memory is None or memory.report.version != raw["metadata"]["resourceVersion"]:
            self._wakeups.wake(key)

    async def pod(self, event: Any, **_: Any) -> None:
        raw = self._took(PODS, event)
        key = self._job_of(raw["metadata"])
        if key is not None and not (event["type"] == "ADDED" and _says_nothing(raw)):
            calm = event["type"] == "MODIFIED" and _starts(raw)
            seconds = PATIENT_SECONDS if calm else COALESCE_SECONDS
            self._wakeups.wake(key, seconds)

    async def node(self, event: Any, **_: Any) -> None:
        raw: Json = event["object"]
        if self._nodes.take(raw, event["type"] == "DELETED"):
            for memory in self._jobs.on_node(raw["metadata"]["name"]):
                self._wakeups.wake(memory.key, COALESCE_SECONDS)

    def _job_of(self, pod: Json) -> JobKey | None:
        """Return the key of a pod's job; one of its two labels may have been removed."""
        labels = pod["labels"]
        known, name = self._jobs.find_uid(labels.get(UID_LABEL, "")), labels.get(JOB_LABEL)
        if known is not None:
            return known.key
        return JobKey(pod["namespace"], name) if name else None

    def _took(self, kind: Kind, event: Any) -> Json:
        raw: Json = event["object"]
        self._delivered.take(kind, raw["metadata"], event["type"] == "DELETED")
        return raw


def _says_nothing(pod: Json) -> bool:
    """Return True if a pod is unchanged since its creation, which its creator already knows of."""
    bound = (pod.get("spec") or {}).get("nodeName")
    return not bound and not (pod.get("status") or {}).get("conditions")


def _starts(pod: Json) -> bool:
    """Return True if a pod is pending or running and none of its containers has terminated."""
    status = pod.get("status") or {}
    found = status.get("containerStatuses") or ()
    ended = any("terminated" in (container.get("state") or {}) for container in found)
    going = bool(pod["metadata"].get("deletionTimestamp"))
    return not going and not ended and status.get("phase") in ("Pending", "Running")


def registry(handlers: Handlers, watch_nodes: bool) -> kopf.OperatorRegistry:
    """Return kopf's registry with a handler for each watched kind."""
    found = kopf.OperatorRegistry()
    kopf.on.login(registry=found)(_login)
    for kind, handler in ((ELASTICJOBS, handlers.job), (PODS, handlers.pod)):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=found)(handler)
    if watch_nodes:
        kopf.on.event(NODES.group, NODES.version, NODES.plural, registry=found)(handlers.node)
    return found


def settings() -> kopf.OperatorSettings:
    """Return kopf settings that disable everything except watching."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.scanning.disabled = True
    found.peering.standalone = True
    found.watching.server_timeout = WATCH_SECONDS
    found.watching.client_timeout = WATCH_SECONDS + 30
    found.watching.connect_timeout = 10
    found.watching.inactivity_timeout = SILENCE_SECONDS
    found.watching.chunk_size = 500
    found.watching.label_selectors[PODS.group, PODS.version, PODS.plural] = UID_LABEL
    found.networking.request_timeout = 60
    found.networking.connect_timeout = 10
    # Lifetime of an object's worker after its last event; short, because there are many objects.
    found.queueing.idle_timeout = 0.1
    found.persistence.diffbase_storage = _NoDiffs()
    found.persistence.progress_storage = _NoProgress()
    return found


def _login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Log in with the pod's service account, else the kubeconfig, as `Kube.connect` does."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


class _NoDiffs(kopf.DiffBaseStorage):
    """Diff storage that stores nothing: computing diffs would cost more than all other work."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing is ever stored on an object")


class _NoProgress(kopf.ProgressStorage):
    """Progress storage that stores nothing: handlers that only wake have no progress."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("nothing is ever stored on an object")

    def purge(self, **_: Any) -> None:
        return

    def touch(self, **_: Any) -> None:
        raise AssertionError("nothing is ever stored on an object")

    def clear(self, *, essence: Any) -> Any:
        return essence
