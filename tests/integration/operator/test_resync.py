"""Periodic sweep: missed changes are found, and etcd is cleared of deleted jobs."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from elasticjob_operator.domain.observed.node_state import Node
from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.etcd_tls.job_users import access_for, uids_with_users, user_name
from elasticjob_operator.kubernetes.client import ELASTICJOBS, PODS, Kube
from elasticjob_operator.model import ElasticJob, parse_manifest
from elasticjob_operator.reconcile.job_memory import JobKey, Jobs, PodMemory
from elasticjob_operator.reconcile.namespaces import ServedNamespaces
from elasticjob_operator.reconcile.resync import Resync
from elasticjob_operator.reconcile.watches import NodeCache, StalenessCheck
from elasticjob_operator.rendezvous.etcd_registry import EtcdRefused, EtcdRegistry
from elasticjob_operator.rendezvous.etcd_source import EtcdSource
from elasticjob_operator.settings import EtcdSettings
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import Keys, cluster_key, job_prefix
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd.test_auth import enable_auth
from tests.integration.etcd_server import EtcdServer
from tests.integration.kube_helpers import elasticjob, pod
from tests.integration.operator_rig import Namespace

UID = "00000000-0000-0000-0000-000000000001"
OTHER_UID = "00000000-0000-0000-0000-000000000002"


class Rig:
    """Sweep of one namespace, with its dependencies; `woken` holds the woken jobs."""

    def __init__(self, kube: Kube, etcds: EtcdRegistry, namespace: str | None) -> None:
        self.woken: list[JobKey] = []
        self.etcds = etcds
        self.jobs = Jobs(time.monotonic, lambda: 0.0)
        self.staleness = StalenessCheck()
        served = ServedNamespaces(kube, () if namespace is None else (namespace,))
        self.resync = Resync(
            kube, served, self.jobs, NodeCache(), self.staleness, etcds, self,
            time.monotonic, lambda: datetime.now(UTC),
        )  # fmt: skip

    def wake(self, key: JobKey) -> None:
        self.woken.append(key)


def run(
    server: ApiServer,
    etcd: EtcdServer,
    namespace: str | None,
    scenario: Callable[[Rig], Awaitable[None]],
    settings: EtcdSettings | None = None,
) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(110),
            Kube.connect(server.kubeconfig()) as kube,
            asyncio.TaskGroup() as tasks,
        ):
            chosen = settings or EtcdSettings((etcd.url,))
            etcds = EtcdRegistry(chosen, kube, tasks, lambda namespace, uid: None)
            assert await etcds.own.cache.reached(0, 60)
            try:
                await scenario(Rig(kube, etcds, namespace))
            finally:
                await etcds.aclose()

    asyncio.run(main())


async def uses_own(rig: Rig, job: ElasticJob) -> bool:
    """Return True if the job's rendezvous is in the operator's own etcd."""
    source = await rig.etcds.of(job)
    return isinstance(source, EtcdSource) and source.etcd is rig.etcds.own


async def seen(rig: Rig, namespace: str) -> None:
    """Wait until the cache has the record that the test has put."""
    async with asyncio.timeout(60):
        while (namespace, UID) not in rig.etcds.own.cache.jobs():
            await asyncio.sleep(0.02)


def owned_by(uid: str, label: str = "") -> dict[str, Any]:
    """Return the metadata of a pod that this job controls, with the label of a job."""
    owner = {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "name": "job",
        "uid": uid,
        "controller": True,
    }
    labels = {"elasticjob.dev/job-uid": label or uid}
    return {"labels": labels, "ownerReferences": [owner]}


def put_bounds(etcd: EtcdServer, namespace: str) -> Keys:
    keys = Keys(job_prefix(namespace, UID, 1))
    etcd.ctl("put", keys.bounds, encode(RendezvousParams(1, 2)).decode())
    return keys


def test_job_without_records_is_reconciled_once_etcd_is_readable(
    api_server: ApiServer, start_etcd: StartEtcd
) -> None:
    """Nothing in etcd changes for it, and its back-off may have grown to a minute."""
    etcd = start_etcd()
    etcd.kill()
    woken: list[tuple[str, str]] = []

    async def main() -> None:
        async with (
            asyncio.timeout(110),
            Kube.connect(api_server.kubeconfig()) as kube,
            asyncio.TaskGroup() as tasks,
        ):
            settings = EtcdSettings((etcd.url,))
            etcds = EtcdRegistry(settings, kube, tasks, lambda *job: woken.append(job))
            raw = elasticjob("new")
            raw["metadata"]["uid"] = UID
            job = parse_manifest(raw)
            for _ in range(2):
                await etcds.of(job)
            assert not woken
            await asyncio.to_thread(etcd.start)
            while not woken:
                await asyncio.sleep(0.02)
            await etcds.of(job)
            await etcds.aclose()

    asyncio.run(main())
    assert woken == [("default", UID)]


@pytest.mark.parametrize("found", ["", '{"number": "of a later release"}'], ids=["none", "unread"])
def test_rendezvous_of_deleted_job_is_closed_then_removed(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str, found: str
) -> None:
    """The content of its round does not matter: an unreadable one does not block the sweep."""
    keys = put_bounds(newest_etcd, namespace)
    if found:
        newest_etcd.ctl("put", keys.round, found)

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        await rig.resync.resync()
        assert "Deleted" in newest_etcd.ctl("get", keys.round)
        await rig.resync.resync()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix) == ""

    run(api_server, newest_etcd, namespace, scenario)


def test_records_are_kept_while_a_pod_exists(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    keys, ns = put_bounds(newest_etcd, namespace), Namespace(api_server, namespace)
    left = pod("left")
    left["metadata"] |= owned_by(UID)
    api_server.request("POST", ns.path("pods"), left)

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        for _ in range(3):
            await rig.resync.resync()
        assert "Deleted" in newest_etcd.ctl("get", keys.round)
        assert newest_etcd.ctl("get", keys.bounds)
        ns.remove_pod("left")
        await rig.resync.resync()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix) == ""

    run(api_server, newest_etcd, namespace, scenario)


@pytest.mark.parametrize("owner", ["", OTHER_UID], ids=["no owner", "another owner"])
def test_label_alone_keeps_no_records(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str, owner: str
) -> None:
    keys, ns = put_bounds(newest_etcd, namespace), Namespace(api_server, namespace)
    left = pod("left")
    left["metadata"] |= owned_by(owner, UID) if owner else {"labels": owned_by(UID)["labels"]}
    api_server.request("POST", ns.path("pods"), left)

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        for _ in range(2):
            await rig.resync.resync()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix) == ""

    run(api_server, newest_etcd, namespace, scenario)


def test_jobs_of_other_namespaces_are_not_touched(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    other = f"{namespace}-other"
    keys = put_bounds(newest_etcd, other)

    async def scenario(rig: Rig) -> None:
        await seen(rig, other)
        for _ in range(3):
            await rig.resync.resync()
        assert newest_etcd.ctl("get", "--prefix", keys.prefix).count("/elasticjob/") == 1

    run(api_server, newest_etcd, namespace, scenario)
    newest_etcd.ctl("del", "--prefix", keys.prefix)


def test_missed_change_triggers_reconcile_and_fails_liveness_probe(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    raw = ns.create_job(maxNodes=1)

    async def scenario(rig: Rig) -> None:
        key = JobKey(namespace, "job")
        await rig.resync.resync()
        assert key in rig.woken
        assert rig.resync.failure_text() == ""
        rig.staleness.take(PODS, raw["metadata"], deleted=False)  # of another kind
        await rig.resync.resync()
        assert rig.resync.failure_text() == "the watch of elasticjobs is dead"

    run(api_server, newest_etcd, namespace, scenario)


def test_job_with_missed_deletion_is_reconciled(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    async def scenario(rig: Rig) -> None:
        key = JobKey(namespace, "gone")
        rig.jobs.recall(key, UID)
        await rig.resync.resync()
        assert rig.woken == [key]

    run(api_server, newest_etcd, namespace, scenario)


def test_pod_with_missed_deletion_triggers_reconcile(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    ns = Namespace(api_server, namespace)
    raw = ns.create_job(maxNodes=1)
    left = pod("left")
    left["metadata"]["labels"] = {"elasticjob.dev/job-uid": raw["metadata"]["uid"]}
    made = api_server.request("POST", ns.path("pods"), left)

    async def scenario(rig: Rig) -> None:
        memory = rig.jobs.recall(JobKey(namespace, "job"), raw["metadata"]["uid"])
        memory.pods = PodMemory(uids=frozenset({made["metadata"]["uid"]}))
        await rig.resync.resync()
        rig.woken.clear()
        rig.staleness.take(ELASTICJOBS, raw["metadata"], deleted=False)
        rig.staleness.take(PODS, made["metadata"], deleted=False)
        rig.resync._count = hash(memory.key) + 1  # so that no resync is due
        await rig.resync.resync()
        assert rig.woken == []
        ns.remove_pod("left")
        await rig.resync.resync()
        assert rig.woken == [memory.key]

    run(api_server, newest_etcd, namespace, scenario)


def test_node_with_missed_deletion_triggers_reconcile_of_its_jobs(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    raw = Namespace(api_server, namespace).create_job(maxNodes=1)

    async def scenario(rig: Rig) -> None:
        memory = rig.jobs.recall(JobKey(namespace, "job"), raw["metadata"]["uid"])
        memory.pods = PodMemory(nodes=frozenset({"gone"}))
        await rig.resync.resync()
        rig.woken.clear()
        rig.staleness.take(ELASTICJOBS, raw["metadata"], deleted=False)
        rig.resync._nodes.known = {"gone": Node()}
        rig.resync._count = hash(memory.key) + 1  # so that no resync is due
        await rig.resync.resync()
        assert rig.woken == [memory.key]
        assert rig.resync._nodes.known == {}

    run(api_server, newest_etcd, namespace, scenario)


def test_dead_etcd_does_not_delay_other_etcds(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str
) -> None:
    own, other = start_etcd("3.6"), start_etcd("3.6")
    keys = put_bounds(own, namespace)
    there = Keys(job_prefix(namespace, OTHER_UID, 1))
    other.ctl("put", there.bounds, encode(RendezvousParams(1, 2)).decode())
    wanted = elasticjob(rendezvous={"endpoints": [other.url]})
    parsed = parse_manifest(wanted | {"metadata": {"name": "job", "uid": OTHER_UID}})
    gone = (namespace, OTHER_UID)

    async def scenario(rig: Rig) -> None:
        source = await rig.etcds.of(parsed)
        assert isinstance(source, EtcdSource)
        named = source.etcd
        assert named.newest(*gone) == 1
        other.kill()
        async with asyncio.timeout(60):
            while named.cache.known:
                await asyncio.sleep(0.02)
        rig.jobs.deleted.add(gone)
        await seen(rig, namespace)
        for _ in range(2):
            await rig.resync.resync()
        assert own.ctl("get", "--prefix", keys.prefix) == ""
        assert gone in rig.jobs.deleted, "it is come back to"
        other.start()
        assert await named.cache.reached(0, 60)
        await rig.resync.resync()
        assert other.ctl("get", "--prefix", there.prefix) == ""
        assert gone not in rig.jobs.deleted

    settings = EtcdSettings((own.url,), allowed=frozenset({other.url}))
    run(api_server, own, namespace, scenario, settings)


def test_stale_cache_of_live_etcd_fails_liveness_probe(
    api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> None:
    async def scenario(rig: Rig) -> None:
        now = [0.0]
        rig.resync._clock = lambda: now[0]
        rig.etcds.own.cache._known = False
        await rig.resync.resync()
        assert rig.resync.failure_text() == ""
        now[0] = 61.0
        assert "informer cache is dead" in rig.resync.failure_text()

    run(api_server, newest_etcd, namespace, scenario)


def test_restricted_etcd_user_does_not_fail_liveness_probe(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str
) -> None:
    """A restart would let one job's Secret interrupt the operator of all jobs again and again."""
    own, other = start_etcd("3.6"), start_etcd("3.6", arguments=("--bcrypt-cost=4",))
    enable_auth(other)
    text = {"username": b"job", "password": b"pass"}
    data = {name: base64.b64encode(value).decode() for name, value in text.items()}
    path = Namespace(api_server, namespace).path("secrets")
    api_server.request("POST", path, {"metadata": {"name": "mine"}, "data": data})
    wanted = elasticjob(rendezvous={"endpoints": [other.url], "secretName": "mine"})
    named = {"metadata": {"name": "job", "namespace": namespace, "uid": UID}}

    async def scenario(rig: Rig) -> None:
        now = [0.0]
        rig.resync._clock = lambda: now[0]
        found = await rig.etcds.of(parse_manifest(wanted | named))
        assert isinstance(found, EtcdSource)
        assert not found.etcd.cache.known
        await rig.resync.resync()
        now[0] = 61.0
        assert rig.resync.failure_text() == ""

    settings = EtcdSettings((own.url,), allowed=frozenset({other.url}))
    run(api_server, own, namespace, scenario, settings)


def cluster_of(server: ApiServer) -> str:
    return str(server.request("GET", "/api/v1/namespaces/kube-system")["metadata"]["uid"])


def test_first_cluster_owns_etcd(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str
) -> None:
    etcd = start_etcd("3.6")
    parsed = parse_manifest(elasticjob() | {"metadata": {"name": "job", "uid": UID}})

    async def scenario(rig: Rig) -> None:
        await rig.resync.resync()
        assert etcd.ctl("get", "--print-value-only", cluster_key()).strip() == cluster_of(
            api_server
        )
        assert await uses_own(rig, parsed)
        await rig.resync.resync()
        assert await uses_own(rig, parsed)

    run(api_server, etcd, namespace, scenario)


def test_etcd_of_another_cluster_is_neither_used_nor_cleared(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str
) -> None:
    etcd = start_etcd("3.6")
    etcd.ctl("put", cluster_key(), "another")
    keys = put_bounds(etcd, namespace)
    parsed = parse_manifest(elasticjob() | {"metadata": {"name": "job", "uid": UID}})

    async def scenario(rig: Rig) -> None:
        await seen(rig, namespace)
        await rig.etcds.guard()
        for _ in range(3):
            await rig.resync.resync()
        assert etcd.ctl("get", keys.bounds)
        assert not etcd.ctl("get", keys.round)
        assert etcd.ctl("get", "--print-value-only", cluster_key()).strip() == "another"
        with pytest.raises(EtcdRefused, match="the jobs of another cluster") as caught:
            await rig.etcds.of(parsed)
        assert caught.value.obstacle is Obstacle.FOREIGN_ETCD
        etcd.ctl("del", cluster_key())
        await rig.resync.resync()
        assert await uses_own(rig, parsed), "what the message says helps"

    run(api_server, etcd, namespace, scenario)


FOREIGN = ("intruder", "helper")


async def intrude(users: Users, job: str) -> None:
    """Leave access as a client can that reached etcd while authentication was off."""
    await users.put_role("helper", "/elasticjob/")
    await users.put_user("intruder", "secret")
    await users.grant("intruder", ROOT)
    await users.grant(job, ROOT)
    await users.put_role(job, "/elasticjob/")


@pytest.mark.parametrize("version", ["3.5", "3.6", "3.7"])
@pytest.mark.parametrize("exclusive", [True, False], ids=["bundled", "external"])
def test_unknown_users_and_grants_of_root_are_found_and_removed_where_safe(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str, version: str, exclusive: bool
) -> None:
    etcd = start_etcd(version, arguments=("--bcrypt-cost=4",))
    uid = Namespace(api_server, namespace).create_job(maxNodes=1)["metadata"]["uid"]
    root = EtcdSettings(
        (etcd.url,),
        user=ROOT,
        password="secret",
        manage_users=True,
        exclusive=exclusive,
        known_users=frozenset() if exclusive else frozenset({"admin"}),
    )

    async def scenario(rig: Rig) -> None:
        await rig.etcds.guard()
        users, job = rig.etcds.own.users, user_name(uid)
        assert users is not None
        await access_for(users, namespace, uid, None, None)
        await users.put_user("admin", "secret")
        if not exclusive:
            await users.grant("admin", ROOT)
        await intrude(users, job)
        await rig.resync.resync()
        found = {str(one) for one in rig.etcds.unknown_access}
        assert {"user 'intruder'", "role 'helper'", f"role 'root' of user {job!r}"} < found
        assert ("user 'admin'" in found) is exclusive
        assert await users.roles_of(job) == (job,)
        assert await users.ranges_of(job) == (), "the next check of the job restores its own"
        left = {*await users.users(), *await users.roles()}
        assert left == {ROOT, job} | (set() if exclusive else {"admin", *FOREIGN})
        await rig.resync.resync()
        assert bool(rig.etcds.unknown_access) is not exclusive

    run(api_server, etcd, namespace, scenario, root)


def test_user_without_job_and_record_is_removed(
    api_server: ApiServer, start_etcd: StartEtcd, namespace: str
) -> None:
    """The user's job was deleted while no operator was running.

    A pod keeps the user of the job that controls it in its own namespace, and no other's.
    """
    etcd = start_etcd("3.6", arguments=("--bcrypt-cost=4",))
    ns = Namespace(api_server, namespace)
    present = ns.create_job(maxNodes=1)["metadata"]["uid"]
    for name, uid in (("own", OTHER_UID), ("of-another-namespace", UID)):
        left = pod(name)
        left["metadata"] |= owned_by(uid)
        api_server.request("POST", ns.path("pods"), left)
    root = EtcdSettings((etcd.url,), user="root", password="secret", manage_users=True)

    async def scenario(rig: Rig) -> None:
        await rig.etcds.guard()
        users = rig.etcds.own.users
        assert users is not None
        await access_for(users, "victims", UID, None, None)
        for uid in (OTHER_UID, present):
            await access_for(users, namespace, uid, None, None)
        await rig.resync.resync()
        assert await uids_with_users(users) == {OTHER_UID, present}

    run(api_server, etcd, None, scenario, root)
