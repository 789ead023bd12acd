"""Watches of the API server: kopf handlers, the cache of Nodes, and the staleness check.

Handlers turn watch events into wake-ups of the work queue. They decide nothing and write
nothing. Only kopf's watches are used: no finalizers, annotations, events, timers or peering.

A watch can die silently. The staleness check compares the object versions that the watches
delivered with those of a LIST. A watch is dead if it has not delivered, by the next LIST, a version
that one LIST showed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import kopf

from elasticjob_operator.domain.manifests.names import JOB_LABEL, UID_LABEL
from elasticjob_operator.domain.observed.node_state import Node, parse_node
from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    NODES,
    PODS,
    Forbidden,
    Json,
    Kind,
    Kube,
)
from elasticjob_operator.reconcile.job_memory import JobKey, Jobs
from elasticjob_operator.reconcile.workqueue import WorkQueue

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.02
"""Delay that merges simultaneous events, such as those of a drained node's pods."""
START_EVENT_SECONDS = 0.25
"""Delay for events of starting pods, which arrive one by one and require no action."""
WATCH_SECONDS = 300
"""Server-side timeout of a watch, after which it resumes at its last version."""
SILENCE_SECONDS = 90.0
"""Inactivity timeout of a watch; the API server sends a bookmark every minute."""
LOGIN_RETRY_SECONDS = 5.0
"""Pause after a failed login, as when a file with credentials is being replaced."""
END_SECONDS = 3.0
"""Maximum wait for cancelled watches; kopf's workers of a watch have two seconds to end."""


class StalenessCheck:
    """Delivered versions by kind and uid. The watches call `take`, the resync calls `compare`."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}
        self._missing: dict[str, dict[str, int]] = {}
        self._dead: set[str] = set()

    @property
    def dead(self) -> tuple[str, ...]:
        """Kinds whose watch is dead."""
        return tuple(sorted(self._dead))

    def take(self, kind: Kind, metadata: Json, deleted: bool) -> None:
        seen = self._seen.setdefault(kind.plural, {})
        if deleted:
            seen.pop(metadata["uid"], None)
        else:
            seen[metadata["uid"]] = _version(metadata)

    def compare(self, kind: Kind, listed: Iterable[Json]) -> set[str]:
        """Return the uids of objects that the LIST shows in a newer version or no longer shows."""
        seen = self._seen.setdefault(kind.plural, {})
        shown = {raw["metadata"]["uid"]: _version(raw["metadata"]) for raw in listed}
        missing = {uid: version for uid, version in shown.items() if seen.get(uid, -1) < version}
        before = self._missing.get(kind.plural, {})
        # Missing at the last comparison and still not delivered.
        if any(uid in shown and seen.get(uid, -1) < version for uid, version in before.items()):
            self._dead.add(kind.plural)
        else:
            self._dead.discard(kind.plural)
        self._missing[kind.plural] = missing
        gone = seen.keys() - shown.keys()
        for uid in gone:
            del seen[uid]
        return missing.keys() | gone


def _version(metadata: Json) -> int:
    """Return the resourceVersion as a number; API servers on etcd allow comparing them."""
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isascii() and text.isdigit() else 0


class NodeCache:
    """Informer cache of Nodes by name. `known` is None if the operator may not read them."""

    def __init__(self) -> None:
        self.known: dict[str, Node] | None = None

    async def load(self, kube: Kube) -> None:
        """List all Nodes once, before the first reconcile of a job."""
        try:
            found = await kube.list(NODES)
        except Forbidden as error:
            log.warning("cannot list nodes, assuming all are Ready: %s", error)
            return
        self.known = {raw["metadata"]["name"]: parse_node(raw) for raw in found}

    def take(self, raw: Json, deleted: bool) -> bool:
        """Apply a watch event of a Node; return True if the change affects its pods."""
        if self.known is None:
            return False
        name: str = raw["metadata"]["name"]
        if deleted:
            return self.known.pop(name, None) is not None
        now = parse_node(raw)
        before, self.known[name] = self.known.get(name), now
        return before != now

    async def drop_missed_deletions(self, kube: Kube) -> list[str]:
        """Drop Nodes whose deletion the watch missed; return their names."""
        if self.known is None:
            return []
        listed = await kube.list(NODES, metadata_only=True)
        names = {raw["metadata"]["name"] for raw in listed}
        gone = [name for name in self.known if name not in names]
        for name in gone:
            del self.known[name]
        return gone


class Handlers:
    """Event handlers of the watches."""

    def __init__(
        self, jobs: Jobs, nodes: NodeCache, staleness: StalenessCheck, queue: WorkQueue
    ) -> None:
        self._jobs = jobs
        self._nodes = nodes
        self._staleness = staleness
        self._queue = queue

    async def job(self, event: Any, **_: Any) -> None:
        raw = self._took(ELASTICJOBS, event)
        key = JobKey(raw["metadata"]["namespace"], raw["metadata"]["name"])
        memory = self._jobs.find(key)
        if memory is None or memory.report.version != raw["metadata"]["resourceVersion"]:
            self._queue.wake(key)

    async def pod(self, event: Any, **_: Any) -> None:
        raw = self._took(PODS, event)
        key = self._job_of(raw["metadata"])
        if key is not None and not (event["type"] == "ADDED" and _is_unchanged(raw)):
            calm = event["type"] == "MODIFIED" and _starts(raw)
            seconds = START_EVENT_SECONDS if calm else COALESCE_SECONDS
            self._queue.wake(key, seconds)

    async def node(self, event: Any, **_: Any) -> None:
        raw: Json = event["object"]
        if self._nodes.take(raw, event["type"] == "DELETED"):
            for memory in self._jobs.on_node(raw["metadata"]["name"]):
                self._queue.wake(memory.key, COALESCE_SECONDS)

    def _job_of(self, pod: Json) -> JobKey | None:
        """Return the key of a pod's job; one of its two labels may have been removed."""
        labels = pod["labels"]
        known, name = self._jobs.find_uid(labels.get(UID_LABEL, "")), labels.get(JOB_LABEL)
        if known is not None:
            return known.key
        return JobKey(pod["namespace"], name) if name else None

    def _took(self, kind: Kind, event: Any) -> Json:
        raw: Json = event["object"]
        self._staleness.take(kind, raw["metadata"], event["type"] == "DELETED")
        return raw


def _is_unchanged(pod: Json) -> bool:
    """Return True if a pod is unchanged since its creation, which the reconcile itself has made."""
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
    register_login(found)
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


def register_login(found: kopf.OperatorRegistry) -> None:
    """Register the login. By default kopf retries it after a minute, without watches until then."""
    kopf.on.login(registry=found, backoff=LOGIN_RETRY_SECONDS)(login)


def login(**arguments: Any) -> kopf.ConnectionInfo | None:
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


class _AllTasks(Collection["asyncio.Task[Any]"]):
    """Set of all tasks of the process, also of later ones."""

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(asyncio.all_tasks())

    def __len__(self) -> int:
        return len(asyncio.all_tasks())


class StopSignals:
    """SIGINT and SIGTERM of the process: the first one ends its watches, the second its drain."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        """Replace kopf's signal handlers, which raise an error at a second signal."""
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(signum, self._handle, signum)

    def _handle(self, signum: signal.Signals) -> None:
        if not self.first.is_set():
            log.info("received %s, stopping", signum.name)
            self.first.set()
        elif not self.second.is_set():
            log.info("received %s, stopping at once", signum.name)
            self.second.set()


async def watch(
    found: kopf.OperatorRegistry, identity: str, signals: StopSignals, **scope: Any
) -> None:
    """Run kopf's watches until SIGINT or SIGTERM, until cancelled, or until a watch fails.

    `kopf.operator` waits at a signal for all tasks that began after it, for five seconds, then
    cancels them: also reconciles that have written a status, and tasks that never end. This leaves
    them alone; the caller waits for those that must be complete, up to the second signal. `signals`
    receives the signals also after the end of the watches.
    """
    before = asyncio.all_tasks()
    try:
        tasks = await kopf.spawn_tasks(
            registry=found,
            settings=settings(),
            # Otherwise kopf looks up the user's name, which a container's uid may not have.
            identity=cast(Any, identity),  # kopf has a type of its own for it
            **scope,
        )
        signals.install()
        signalled = asyncio.create_task(signals.first.wait(), name="signal")
        # The end of one of these tasks ends the others.
        await kopf.run_tasks([*tasks, signalled], ignored=_AllTasks())
    finally:
        await _end_watchers(before)


async def _end_watchers(before: Collection[asyncio.Task[Any]]) -> None:
    """Cancel kopf's watchers that are not among the tasks `before`.

    If one watcher fails, kopf does not stop the others. `asyncio.run` would cancel each watcher
    together with its pause-waiter, and kopf ignores a cancellation after the pause-waiter's end.
    """
    watchers = [
        task
        for task in asyncio.all_tasks()
        if task not in before and task.get_name().startswith("watcher for ")
    ]
    for watcher in watchers:
        watcher.cancel()
    if watchers:
        await asyncio.wait(watchers, timeout=END_SECONDS)
