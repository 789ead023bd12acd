"""Agents beside launchers whose etcd user is rotated while they train."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.etcd_tls.job_users import access_for, remove_old_users
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.store_health import CONSEQUENCE
from tests.integration.agent_rig import Gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import launcher_file, process_tag

__all__ = ["launcher_file", "process_tag"]

Result = TypeVar("Result")

PASSWORD = "the-root-password"
LEASE_SECONDS = 3.0
STEP_SECONDS = 0.02
"""Minimum time of a worker's step."""


@pytest.fixture
def gang(process_tag: str, tmp_path: Path, start_etcd: StartEtcd) -> Iterator[Gang]:
    gang = Gang(tmp_path, start_etcd("3.6", arguments=("--bcrypt-cost=4",)))
    yield gang
    gang.close()


def administer(etcd: EtcdServer, work: Callable[[Users], Awaitable[Result]]) -> Result:
    """Return the result of this work on etcd's users."""

    async def main() -> Result:
        async with Client([etcd.url], user=ROOT, password=PASSWORD) as client:
            return await work(Users(client))

    return asyncio.run(main())


def rotation_of(uid: str, access: Access) -> Callable[[Users], Awaitable[Access]]:
    return lambda users: access_for(users, "default", uid, access, None, rotate=True)


def end_of_others(uid: str, access: Access) -> Callable[[Users], Awaitable[tuple[str, ...]]]:
    return lambda users: remove_old_users(users, uid, access)


def mount(folder: Path, access: Access, version: int) -> None:
    """Replace the files of the Secret at once, as the kubelet does: by a link to their folder."""
    made = folder / f"version-{version}"
    made.mkdir(parents=True)
    (made / "user").write_text(str(access.user))
    (made / "password").write_text(str(access.password))
    (folder / "next").symlink_to(made)
    (folder / "next").replace(folder / "data")


def await_steps(gang: Gang, worker: dict[str, Any], count: int) -> None:
    """Wait for this number of further steps."""
    before = gang.steps(worker)
    until(lambda: gang.steps(worker) > before + count, f"{count} steps of a worker")


def round_of(gang: Gang) -> Round:
    key = Keys(gang.prefix).round
    value = gang.etcd.ctl("get", "--print-value-only", key, user=f"root:{PASSWORD}")
    return decode(Round, key, value.encode())


def test_agents_train_through_two_rotations_and_then_form_a_round(
    gang: Gang, launcher_file: Path, tmp_path: Path
) -> None:
    uid, folder, etcd = gang.run_id, tmp_path / "secret", gang.etcd
    access = administer(etcd, lambda users: access_for(users, "default", uid, None, None))
    mount(folder, access, 0)
    bounds = RendezvousParams(
        1, 4, expected=2, keep_alive_seconds=LEASE_SECONDS, stop_grace_seconds=3.0
    )
    key, root = Keys(gang.prefix).bounds, f"root:{PASSWORD}"
    etcd.ctl("put", key, encode(bounds).decode(), user=root)
    files = {
        "ELASTICJOB_ETCD_USER_FILE": str(folder / "data" / "user"),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(folder / "data" / "password"),
    }
    pods = [gang.pod(f"pod-{n}", launcher_file, LEASE_SECONDS, files) for n in range(2)]
    workers = gang.started(1, 2)
    for number in (1, 2):
        former, access = access, administer(etcd, rotation_of(uid, access))
        mount(folder, access, number)
        assert administer(etcd, end_of_others(uid, access)) == (former.user,)
        await_steps(gang, workers[0], int(2 * LEASE_SECONDS / STEP_SECONDS))
    assert round_of(gang).number == 1, gang.outputs()
    assert CONSEQUENCE not in gang.outputs()
    gang.fail(1)
    gang.started(2, 2)
    gang.finish()
    assert [pod.agent.wait() for pod in pods] == [0, 0], gang.outputs()
    assert round_of(gang).number == 2
