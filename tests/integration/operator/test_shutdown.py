"""End of an active replica: by a signal, and after the failure of a watch."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from elasticjob_operator.kubernetes.client import Kube
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.reconcile.job_memory import JobKey
from elasticjob_operator.reconcile.reconciler import Reconciler
from elasticjob_operator.reconcile.workqueue import WorkQueue
from elasticjob_operator.replica import active
from elasticjob_operator.replica.active import ActiveReplica
from elasticjob_operator.replica.health import Health
from tests.integration.operator.test_namespace_access import RestrictedServer, settings, until

Scenario = Callable[[ActiveReplica], Coroutine[Any, Any, None]]


class FailingServer(RestrictedServer):
    """Server that does not answer watches of namespace b, and then fails those of namespace a."""

    def __init__(self) -> None:
        super().__init__()
        self._unanswered = 0
        self._complete = asyncio.Event()

    async def _watch(self, request: web.Request, name: str) -> web.StreamResponse:
        if name == "b":
            self._unanswered += 1
            if self._unanswered == 2:
                self._complete.set()
            await self._ends.setdefault(name, asyncio.Event()).wait()
        await self._complete.wait()
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b'{"type": "ERROR", "object": {"code": 500}}\n')
        return stream


def run(server: RestrictedServer, tmp_path: Path, scenario: Scenario) -> ActiveReplica:
    async def main(kubeconfig: Path) -> ActiveReplica:
        async with asyncio.timeout(110), Kube.connect(kubeconfig) as kube:
            replica = ActiveReplica(settings(), kube, Metrics(), Health())
            await scenario(replica)
            return replica

    with pytest.MonkeyPatch.context() as patch, server.serving(tmp_path) as kubeconfig:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        patch.setattr(active, "FIRST_READ_SECONDS", 0.1)
        return asyncio.run(main(kubeconfig))


class Reconciles:
    """Reconciles that end after `finishing` is set; `completed` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = asyncio.Event()
        self.finishing = asyncio.Event()
        self.completed = 0
        finish = WorkQueue.finish

        async def reconcile(_: Reconciler, key: JobKey) -> None:
            self.began.set()
            await self.finishing.wait()
            self.completed += 1

        async def finished(queue: WorkQueue) -> None:
            self.finish()
            await finish(queue)

        self.finish: Callable[[], None] = self.finishing.set
        monkeypatch.setattr(Reconciler, "reconcile", reconcile)
        monkeypatch.setattr(WorkQueue, "finish", finished)

    async def begin(self, replica: ActiveReplica) -> None:
        replica._queue.wake(JobKey("a", "job"))
        await self.began.wait()


def test_failed_watch_ends_watches_without_an_answer(tmp_path: Path) -> None:
    """`asyncio.run` cannot end them: kopf would ignore the cancellation and connect again."""

    async def scenario(replica: ActiveReplica) -> None:
        with pytest.raises(ExceptionGroup, match="TaskGroup") as raised:
            await replica.run()
        assert "WatchingError" in repr(raised.value)
        left = [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for")]
        for task in left:  # before asyncio.run cancels their pause-waiters
            task.cancel()
        if left:
            await asyncio.wait(left)
        assert left == []

    run(FailingServer(), tmp_path, scenario)


def test_reconciles_are_completed_after_the_failure_of_a_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciles = Reconciles(monkeypatch)

    async def scenario(replica: ActiveReplica) -> None:
        async def watch(*_: Any, **__: Any) -> None:
            await reconciles.begin(replica)
            raise RuntimeError("failed")

        monkeypatch.setattr(active, "watch", watch)
        with pytest.raises(ExceptionGroup):
            await replica.run()

    replica = run(RestrictedServer(), tmp_path, scenario)
    assert reconciles.completed == 1
    assert not replica.interrupted


def test_replica_with_a_cancelled_reconcile_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Lease must expire: the API server may still process a request of the reconcile."""

    reconciles = Reconciles(monkeypatch)
    reconciles.finish = lambda: None

    async def scenario(replica: ActiveReplica) -> None:
        monkeypatch.setattr(active, "FINISH_SECONDS", 0.0)
        monkeypatch.setattr(active, "watch", lambda *_, **__: reconciles.begin(replica))
        await replica.run()

    replica = run(RestrictedServer(), tmp_path, scenario)
    assert reconciles.completed == 0
    assert replica.interrupted


def test_second_signal_ends_the_wait_for_reconciles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciles, server = Reconciles(monkeypatch), RestrictedServer()
    draining = asyncio.Event()
    reconciles.finish = draining.set

    async def scenario(replica: ActiveReplica) -> None:
        monkeypatch.setattr(active, "FINISH_SECONDS", 600.0)
        serving = asyncio.create_task(replica.run())
        await until(lambda: server.watches["a"] == 2, serving)
        await reconciles.begin(replica)
        signal.raise_signal(signal.SIGTERM)
        await draining.wait()
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await serving

    replica = run(server, tmp_path, scenario)
    assert reconciles.completed == 0
    assert replica.interrupted, "its Lease expires"


def test_one_signal_does_not_end_the_wait_for_reconciles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciles, server = Reconciles(monkeypatch), RestrictedServer()

    async def scenario(replica: ActiveReplica) -> None:
        serving = asyncio.create_task(replica.run())
        await until(lambda: server.watches["a"] == 2, serving)
        await reconciles.begin(replica)
        signal.raise_signal(signal.SIGTERM)
        await serving

    replica = run(server, tmp_path, scenario)
    assert reconciles.completed == 1
    assert not replica.interrupted
