"""Reconcile loop of a local job over a rendezvous that a test sets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elasticjob_cli.local.job_store import JobFolder
from elasticjob_cli.local.kubelet import Kubelet, Programs
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.reconciler import LocalRendezvous, ReconcileLoop
from elasticjob_cli.local.round_log import RoundLog
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.observed.state import Observed
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory
from elasticjob_rendezvous.etcd.errors import EtcdError, Unavailable
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.operator.builders import job
from tests.unit.operator.rendezvous.fake_source import FakeSource

SECONDS = 60.0


@dataclass
class RefusingSource(FakeSource):
    """Source whose writes meet these errors, one after the other."""

    errors: list[EtcdError] = field(default_factory=list)

    async def write_params(
        self, memory: JobMemory, incarnation: int, bounds: RendezvousParams, revision: int
    ) -> None:
        await super().write_params(memory, incarnation, bounds, revision)
        if self.errors:
            raise self.errors.pop(0)


class RecordingKubelet(Kubelet):
    """Kubelet that starts no process; `created` holds the names of the wanted pods."""

    created: list[str]

    async def create(self, index: int, name: str, incarnation: int) -> None:
        self.created.append(name)


@dataclass
class Rig:
    """Loop of a job whose pods start no process."""

    folder: Path
    source: RefusingSource
    notes: list[str] = field(default_factory=list)
    shown: list[Observed] = field(default_factory=list)
    created: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stored = StoredJob(job(), JobFolder("default", "job"), lambda: None, lambda text: None)
        processes = cast("Processes", SimpleNamespace(pids={}, gone=asyncio.Event()))
        kubelet = RecordingKubelet(
            processes,
            self.folder,
            self.folder,
            cast("Programs", SimpleNamespace()),
            cast("asyncio.TaskGroup", SimpleNamespace()),
            lambda _: None,
        )
        kubelet.created = self.created
        metadata = self.stored.job.metadata
        memory = JobMemory(JobKey(metadata.namespace, metadata.name), metadata.uid)
        self.loop = ReconcileLoop(
            self.stored,
            processes,
            kubelet,
            LocalRendezvous(self.source, memory, lambda: None),
            RoundLog(0),
            self.shown.append,
            self.notes.append,
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_write_that_etcd_refuses_is_repeated_and_noted_once(folder: Path) -> None:
    async def scenario() -> None:
        errors: list[EtcdError] = [
            Unavailable("put", "//etcd", "down"),
            Unavailable("put", "//etcd", "down"),
            Unavailable("put", "//etcd", "full"),
        ]
        rig = Rig(folder, RefusingSource(errors=errors))
        running = asyncio.create_task(rig.loop.run())
        async with asyncio.timeout(SECONDS):
            while len(rig.source.writes) < 4:
                assert not rig.created
                rig.loop.wake()
                await asyncio.sleep(0.01)
            while not rig.created:
                await asyncio.sleep(0.01)
        rig.loop.killed.set()
        rig.loop.wake()
        await running
        refused = [one for one in rig.notes if one.startswith("cannot write to etcd, retrying: ")]
        assert [("down" in one, "full" in one) for one in refused] == [(True, False), (False, True)]
        assert rig.stored.job.spec.nodes is not None, "written before the first status"
        assert rig.shown

    asyncio.run(scenario())
