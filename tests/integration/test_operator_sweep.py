"""The sweep: what was missed is found, and etcd is cleared of jobs that are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from elasticjob_operator.delivered import Delivered
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.jobs import JobKey, Jobs
from elasticjob_operator.kube import PODS, Kube
from elasticjob_operator.nodes import Nodes
from elasticjob_operator.settings import EtcdSettings
from elasticjob_operator.sweep import Sweep
from elasticjob_operator.wakeups import Wakeups
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.keys import Keys, job_prefix
from elasticjob_rendezvous.core.records import Bounds
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer
from tests.integration.kube_rig import pod
from tests.integration.operator_rig import Namespace

UID = "00000000-0000-0000-0000-000000000001"


class Rig:
    """A sweep of one namespace, with what it works on."""

    def __init__(self, kube: Kube, etcds: Etcds, namespace: str) -> None:
        self.woken: list[JobKey] = []
        self.etcds = etcds
        self.jobs = Jobs(time.monotonic, lambda: 0.0)
        self.delivered = Delivered()
        self.wakeups = Wakeups(time.monotonic)
        self.wakeups.wake = lambda key, delay_seconds=0.0: self.woken.append(key)  # type: ignore[method-assign]
        self.sweep = Sweep(
            kube, (namespace,), self.jobs, Nodes(), self.delivered, etcds, self.wakeups,
            time.monotonic, lambda: datetime.now(UTC),
        )  # fmt: skip


def run(
    server: ApiServer,
    etcd: EtcdServer,
    namespace: str,
    scenario: Callable[[Rig], Awaitable[None]],
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(60),
            Kube.connect(server.kubeconfig()) as kube,
            asyncio.TaskGroup() as tasks,
        ):
            etcds = Etcds(EtcdSettings((etcd.url,)), kube, tasks, lambda namespace, uid: None)
            assert await etcds.own.mirror.reached(0, 10)
            try:
                await scenario(Rig(kube, etcds, namespace))
            finally:
                await etcds.aclose()

    asyncio.run(main())


async def seen(rig: Rig, namespace: str) -> None:
    """Wait until the mirror has the record that the test has put."""
    async with asyncio.timeout(10):
        while (namespace, UID) not in rig.etcds.own.mirror.jobs():
            await asyncio.sleep(0.02)


def put_bounds(etcd: EtcdServer, namespace: str) -> Keys:
    keys = Keys(job_prefix(namespace, UID, 1))
    etcd.ctl("put", keys.bounds, encode(Bounds(1, 2)).decode())
    return keys


def test_a_job_that_is_gone_is_closed_and_then_cleared(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    keys = put_bounds(newest_etcd, namespace)

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        await rig.sweep.sweep()
        assert "Deleted" in newest_etcd.ctl("get", keys.round)
        await rig.sweep.sweep()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix) == ""

    run(api_server, newest_etcd, namespace, scenario)


def test_nothing_is_cleared_while_a_pod_is_left(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    keys, here = put_bounds(newest_etcd, namespace), Namespace(api_server, namespace)
    left = pod("left")
    left["metadata"]["labels"] = {"elasticjob.dev/job-uid": UID}
    api_server.request("POST", here.path("pods"), left)

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        for _ in range(3):
            await rig.sweep.sweep()
        assert "Deleted" in newest_etcd.ctl("get", keys.round)
        assert newest_etcd.ctl("get", keys.bounds)
        here.remove_pod("left")
        await rig.sweep.sweep()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix) == ""

    run(api_server, newest_etcd, namespace, scenario)


def test_jobs_of_other_namespaces_are_left_to_whoever_serves_them(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    other = f"{namespace}-other"
    keys = put_bounds(newest_etcd, other)

    async def scenario(rig: Rig) -> None:
        await seen(rig, other)
        for _ in range(3):
            await rig.sweep.sweep()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix).count("/elasticjob/") == 1

    run(api_server, newest_etcd, namespace, scenario)
    newest_etcd.ctl("del", "--prefix", keys.prefix)


def test_what_the_watch_did_not_bring_wakes_its_job_and_fails_the_probe(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    here = Namespace(api_server, namespace)
    raw = here.create_job(maxNodes=1)

    async def scenario(rig: Rig) -> None:
        key = JobKey(namespace, "job")
        await rig.sweep.sweep()
        assert key in rig.woken
        assert rig.sweep.ailment() == ""
        rig.delivered.take(PODS, raw["metadata"], deleted=False)  # of another kind
        await rig.sweep.sweep()
        assert rig.sweep.ailment() == "the watch of elasticjobs is dead"

    run(api_server, newest_etcd, namespace, scenario)


def test_a_job_whose_deletion_was_missed_is_woken(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    async def scenario(rig: Rig) -> None:
        key = JobKey(namespace, "gone")
        rig.jobs.recall(key, UID)
        await rig.sweep.sweep()
        assert rig.woken == [key]

    run(api_server, newest_etcd, namespace, scenario)


def test_a_mirror_that_is_dead_while_etcd_answers_fails_the_probe(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    async def scenario(rig: Rig) -> None:
        now = [0.0]
        rig.sweep._clock = lambda: now[0]
        rig.etcds.own.mirror._known = False
        await rig.sweep.sweep()
        assert rig.sweep.ailment() == ""
        now[0] = 61.0
        assert "mirror is dead" in rig.sweep.ailment()

    run(api_server, newest_etcd, namespace, scenario)
