"""Revocation of a job with too many records, interrupted after each of its steps and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.owned_objects import access_in, secret
from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.etcd_tls.job_users import access_for, uids_with_users
from elasticjob_operator.model import parse_manifest
from elasticjob_operator.rendezvous import etcd_registry
from elasticjob_operator.rendezvous.etcd_registry import EtcdRefused
from elasticjob_operator.rendezvous.record_store import UNKNOWN_NODES, quota_of
from elasticjob_operator.settings import EtcdSettings
from elasticjob_rendezvous.protocol.kv import Put, Range, Txn
from elasticjob_rendezvous.protocol.records.keys import job_folder
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.operator.test_resync import Rig, run
from tests.integration.operator_rig import Namespace

SECRET = "job-elasticjob"


class Killed(Exception):
    """The operator ended here."""


@pytest.mark.parametrize("last_step", ["remove_users", "renew_revoked_secret", "remove_job"])
def test_revocation_interrupted_after_a_step_is_completed_by_the_next_operator(
    api_server: ApiServer,
    start_etcd: StartEtcd,
    namespace: str,
    last_step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    etcd = start_etcd("3.6", arguments=("--bcrypt-cost=4",))
    settings = EtcdSettings((etcd.url,), user="root", password="secret", manage_users=True)
    ns = Namespace(api_server, namespace)
    job = parse_manifest(ns.create_job(maxNodes=1))
    uid = job.metadata.uid
    folder = job_folder(namespace, uid)

    async def exceeds(rig: Rig) -> None:
        """Give the job a user, and more records than its quota allows."""
        await rig.etcds.guard()
        users, client = rig.etcds.own.users, rig.etcds.own.client
        assert users is not None
        access = await access_for(users, namespace, uid, None, None)
        api_server.request("POST", ns.path("secrets"), secret(job, access, {}))
        for first in range(0, quota_of(UNKNOWN_NODES).keys + 100, 100):
            puts = (Put(f"{folder}1/junk/{first + at}", b"x") for at in range(100))
            await client.txn(Txn((), tuple(puts)))

    async def interrupted(rig: Rig) -> None:
        await exceeded(rig)
        with monkeypatch.context() as patch:
            patch.setattr(etcd_registry, last_step, killed_after(getattr(etcd_registry, last_step)))
            with pytest.raises(Killed):
                await rig.etcds.of(job)

    async def repeated(rig: Rig) -> None:
        users, client = rig.etcds.own.users, rig.etcds.own.client
        assert users is not None
        if last_step == "remove_job":  # all was done but the status
            assert (await client.range(Range(folder, prefix=True))).kvs == ()
            await rig.etcds.of(job)
        else:
            await exceeded(rig)
            with pytest.raises(EtcdRefused) as refusal:
                await rig.etcds.of(job)
            assert refusal.value.obstacle is Obstacle.RECORDS
        assert await uids_with_users(users) == set()
        assert (await client.range(Range(folder, prefix=True))).kvs == ()

    async def exceeded(rig: Rig) -> None:
        async with asyncio.timeout(60):
            while rig.etcds.own.cache.exceeded(namespace, uid) is None:
                await asyncio.sleep(0.02)

    run(api_server, etcd, namespace, exceeds, settings)
    before = access_in(ns.present("secrets", SECRET))
    run(api_server, etcd, namespace, interrupted, settings)
    run(api_server, etcd, namespace, repeated, settings)
    after = access_in(ns.present("secrets", SECRET))
    assert before is not None
    assert after is not None
    assert after.user != before.user
    assert after.password != before.password
    assert after.job_key == before.job_key


def killed_after(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def perform(*arguments: Any) -> None:
        await step(*arguments)
        raise Killed

    return perform
