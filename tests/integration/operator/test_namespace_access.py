"""Operator with a list of namespaces, in which its rights come and go, against a small API server.

The server refuses requests by namespace, as RBAC does when a namespace and its Role are deleted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import kopf
import pytest
from aiohttp import web

from elasticjob_operator.kubernetes.client import Forbidden, Kube, Unauthorized
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.reconcile import namespaces as namespaces_module
from elasticjob_operator.reconcile import resync as resync_module
from elasticjob_operator.reconcile import watches
from elasticjob_operator.reconcile.job_memory import JobKey, Jobs
from elasticjob_operator.reconcile.namespaces import ServedNamespaces
from elasticjob_operator.reconcile.resync import Resync
from elasticjob_operator.reconcile.watches import NodeCache, StalenessCheck
from elasticjob_operator.reconcile.watches import settings as kopf_settings
from elasticjob_operator.rendezvous.etcd_registry import EtcdRegistry
from elasticjob_operator.replica import active
from elasticjob_operator.replica.active import ActiveReplica
from elasticjob_operator.replica.health import Health
from elasticjob_operator.replica.lease import LeaseSettings
from elasticjob_operator.settings import EtcdSettings, Settings, SidecarSettings

NO_ETCD = EtcdSettings(("http://127.0.0.1:1",))
OBJECTS = re.compile(
    r"/(?:api/v1|apis/elasticjob.dev/v1alpha1)/(?:namespaces/(\w+)/)?(pods|elasticjobs)"
)
DOCUMENTS: dict[str, dict[str, Any]] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [("pods", "Pod", True), ("namespaces", "Namespace", False)]},
    "/apis": {
        "groups": [
            {
                "name": "elasticjob.dev",
                "versions": [{"version": "v1alpha1"}],
                "preferredVersion": {"version": "v1alpha1"},
            }
        ]
    },
    "/apis/elasticjob.dev/v1alpha1": {"resources": [("elasticjobs", "ElasticJob", True)]},
}


class RestrictedServer:
    """API server without objects. `refused` holds the status of refusals by namespace; the empty
    name stands for all namespaces.

    Attributes:
        items: the items of each page of a list; pages until it is empty, then one empty page.
        lists: namespace and kind of each request for a list.
        watches: number of open watches by namespace.
    """

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.items: list[str] = []
        self.lists: list[tuple[str, str]] = []
        self.watches: Counter[str] = Counter()
        self._ends: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()

    def refuse(self, *names: str) -> None:
        """Refuse requests in these namespaces and end their watches."""
        for name in names:
            self.refused[name] = 403
            self._loop.call_soon_threadsafe(self._ends.pop(name, asyncio.Event()).set)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        found = OBJECTS.fullmatch(request.path)
        if found is None:
            return _discovery(request.path)
        namespace, kind = found[1] or "", found[2]
        if "watch" not in request.query:
            self.lists.append((namespace, kind))
        if status := self.refused.get(namespace):
            return _failure(status)
        if "watch" in request.query:
            return await self._watch(request, namespace)
        items, more = (self.items.pop(0), "more") if self.items else ("", "")
        metadata = f'{{"resourceVersion": "1", "continue": "{more}"}}'
        page = f'{{"metadata": {metadata}, "items": [{items}]}}'
        return web.Response(text=page, content_type="application/json")

    async def _watch(self, request: web.Request, name: str) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        self.watches[name] += 1
        try:
            await self._ends.setdefault(name, asyncio.Event()).wait()
        finally:
            self.watches[name] -= 1
        return stream

    @contextmanager
    def serving(self, folder: Path) -> Iterator[Path]:
        """Serve in a thread, as kopf ends the tasks of its own loop; yield a kubeconfig."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0, access_log=None)
        thread = Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            self._run(runner.setup())
            self._run(web.TCPSite(runner, "127.0.0.1", 0).start())
            host, port = runner.addresses[0][:2]
            path = folder / "kubeconfig"
            path.write_text(json.dumps(_kubeconfig(f"http://{host}:{port}")))
            yield path
        finally:
            self.refuse(*self._ends)
            try:
                self._run(_unconnected(runner))
                self._run(runner.cleanup())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                thread.join(60)
                self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


async def _unconnected(runner: web.AppRunner) -> None:
    """Wait until the clients have disconnected."""
    assert runner.server is not None
    async with asyncio.timeout(50):
        while runner.server.connections:
            await asyncio.sleep(0.01)


def _discovery(path: str) -> web.Response:
    document = DOCUMENTS.get(path)
    if document is None:
        return _failure(403)
    if "resources" not in document:
        return web.json_response(document)
    resources = [
        {"name": name, "kind": kind, "singularName": "", "namespaced": namespaced,
         "verbs": ["list", "watch"]}
        for name, kind, namespaced in document["resources"]
    ]  # fmt: skip
    return web.json_response({"resources": resources})


def _failure(status: int) -> web.Response:
    reason = "Unauthorized" if status == 401 else "Forbidden"
    document = {"kind": "Status", "status": "Failure", "reason": reason, "message": "refused"}
    return web.json_response(document, status=status)


def _kubeconfig(server: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server}}],
        "users": [{"name": "it", "user": {"token": "secret"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }


def settings() -> Settings:
    return Settings(
        SidecarSettings("image"), NO_ETCD, LeaseSettings("ns", "lease", "it"), namespaces=("a", "b")
    )


async def until(check: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Wait until `check` holds; fail if the task ends before."""
    async with asyncio.timeout(60):
        while not check():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    messages = (record.getMessage() for record in caplog.records)
    return [message for message in messages if text in message]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the checks, and further kopf's patience with a refused watch."""

    def impatient() -> kopf.OperatorSettings:
        found = kopf_settings()
        found.networking.error_backoffs = (0.5, 0.5)
        return found

    monkeypatch.setattr(watches, "settings", impatient)
    monkeypatch.setattr(active, "FIRST_READ_SECONDS", 0.1)
    monkeypatch.setattr(namespaces_module, "CHECK_SECONDS", 0.1)


@pytest.mark.usefixtures("quick")
def test_operator_serves_the_namespaces_with_access_while_others_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Access to b is missing at the start, comes, and goes; kopf's watches follow."""
    server = RestrictedServer(b=403)

    async def main(kubeconfig: Path) -> None:
        async with asyncio.timeout(110), Kube.connect(kubeconfig) as kube:
            replica = ActiveReplica(settings(), kube, Metrics(), Health())
            task = asyncio.create_task(replica.run())
            await until(lambda: server.watches["a"] == 2, task)
            assert server.watches["b"] == 0
            assert len(warnings(caplog, "no access to namespace b")) == 1
            server.refused.clear()
            await until(lambda: server.watches["b"] == 2, task)
            assert len(warnings(caplog, "access to namespace b is back")) == 1
            server.refuse("b")
            await until(
                lambda: (
                    server.watches == {"a": 2, "b": 0}
                    and len(warnings(caplog, "no access to namespace b")) == 2
                ),
                task,
            )
            ended, _ = await asyncio.wait({task}, timeout=3)  # kopf's patience is 1 s
            assert not ended
            assert server.watches == {"a": 2, "b": 0}
            assert len(warnings(caplog, "no access to namespace b")) == 2
            server.refuse("a")  # without access to any namespace, the process ends
            await asyncio.wait({task}, timeout=60)
            assert "APIForbiddenError" in repr(task.exception())

    with server.serving(tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        asyncio.run(main(kubeconfig))


@pytest.mark.parametrize(
    ("refused", "error"), [({"a": 403, "b": 403}, Forbidden), ({"b": 401}, Unauthorized)]
)
def test_operator_does_not_start_without_any_access(
    tmp_path: Path, refused: dict[str, int], error: type[Exception]
) -> None:
    server = RestrictedServer(**refused)

    async def main(kubeconfig: Path) -> None:
        async with Kube.connect(kubeconfig) as kube:
            with pytest.raises(error):
                await ActiveReplica(settings(), kube, Metrics(), Health()).run()

    with server.serving(tmp_path) as kubeconfig:
        asyncio.run(main(kubeconfig))


def test_incomplete_kubeconfig_delays_the_watches_by_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when another program is writing it. By default kopf retries a login after a minute."""
    server = RestrictedServer()
    incomplete = tmp_path / "incomplete"
    incomplete.touch()
    monkeypatch.setenv("KUBECONFIG", str(incomplete))
    monkeypatch.setattr(active, "FIRST_READ_SECONDS", 0.1)

    async def main(kubeconfig: Path) -> None:
        async with asyncio.timeout(110), Kube.connect(kubeconfig) as kube:
            task = asyncio.create_task(ActiveReplica(settings(), kube, Metrics(), Health()).run())
            await until(lambda: bool(warnings(caplog, "Activity 'login' failed")), task)
            incomplete.write_text(kubeconfig.read_text())
            async with asyncio.timeout(50):
                await until(lambda: server.watches == {"a": 2, "b": 2}, task)
            task.cancel()
            await asyncio.wait({task})

    with server.serving(tmp_path) as kubeconfig:
        asyncio.run(main(kubeconfig))


class Rig:
    """Resync of these namespaces without etcd; `woken` holds the woken jobs."""

    def __init__(self, kube: Kube, etcds: EtcdRegistry, names: Sequence[str]) -> None:
        self.woken: list[JobKey] = []
        self.jobs = Jobs(time.monotonic, lambda: 0.0)
        self.resync = Resync(
            kube, ServedNamespaces(kube, names), self.jobs, NodeCache(), StalenessCheck(),
            etcds, self, time.monotonic, lambda: datetime.now(UTC),
        )  # fmt: skip

    def wake(self, key: JobKey) -> None:
        self.woken.append(key)


@asynccontextmanager
async def rig(kubeconfig: Path, names: Sequence[str] = ("a", "b")) -> AsyncIterator[Rig]:
    async with (
        asyncio.timeout(110),
        Kube.connect(kubeconfig) as kube,
        asyncio.TaskGroup() as tasks,
    ):
        etcds = EtcdRegistry(NO_ETCD, kube, tasks, lambda namespace, uid: None)
        try:
            yield Rig(kube, etcds, names)
        finally:
            await etcds.aclose()


def test_resync_of_all_namespaces_sends_one_request_for_each_list(tmp_path: Path) -> None:
    server = RestrictedServer()

    async def main(kubeconfig: Path) -> None:
        async with rig(kubeconfig, ()) as found:
            found.jobs.deleted.add(("a", "uid-1"))
            await found.resync.resync()
            assert server.lists == [("", "elasticjobs"), ("", "pods")]
            server.refused[""] = 403
            with pytest.raises(Forbidden):
                await found.resync.resync()
            assert server.lists[2:] == [("", "elasticjobs")]
            assert found.jobs.deleted == {("a", "uid-1")}

    with server.serving(tmp_path) as kubeconfig:
        asyncio.run(main(kubeconfig))


def test_jobs_of_a_namespace_without_access_do_not_count_as_deleted(tmp_path: Path) -> None:
    server = RestrictedServer(b=403)

    async def main(kubeconfig: Path) -> None:
        async with rig(kubeconfig) as found:
            found.jobs.recall(JobKey("a", "known"), "uid-1")
            found.jobs.recall(JobKey("b", "known"), "uid-2")
            found.jobs.deleted |= {("a", "uid-3"), ("b", "uid-4")}
            for _ in range(2):
                await found.resync.resync()
            assert set(found.woken) == {JobKey("a", "known")}
            assert found.jobs.deleted == {("b", "uid-4")}
            server.refused.clear()
            for _ in range(2):
                await found.resync.resync()
            assert set(found.woken) == {JobKey("a", "known"), JobKey("b", "known")}
            assert not found.jobs.deleted

    with server.serving(tmp_path) as kubeconfig:
        asyncio.run(main(kubeconfig))


def test_too_many_objects_fail_only_one_resync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond the maximum number of objects the resync is incomplete, and the next one is tried."""
    server = RestrictedServer()
    monkeypatch.setattr(resync_module, "RESYNC_SECONDS", 0.01)
    monkeypatch.setattr(resync_module, "MIN_PAUSE_RATIO", 0)
    page = ",".join(itertools.repeat('{"metadata":{}}', 100_000))

    async def main(kubeconfig: Path) -> None:
        async with rig(kubeconfig) as found:
            server.items = [page] * 3
            task = asyncio.create_task(found.resync.run())
            text = "the resync is incomplete"
            await until(lambda: bool(warnings(caplog, text)), task)
            assert "more than 200000 objects match" in warnings(caplog, text)[0]
            found.jobs.recall(JobKey("a", "known"), "uid-1")
            await until(lambda: JobKey("a", "known") in found.woken, task)
            task.cancel()
            await asyncio.wait({task})

    with server.serving(tmp_path) as kubeconfig:
        asyncio.run(main(kubeconfig))
