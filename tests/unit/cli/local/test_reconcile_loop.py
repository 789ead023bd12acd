"""Reconcile loop of a local job over a rendezvous that a test sets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import JobFolder
from elasticjob_cli.local.kubelet import Kubelet, LocalPod, PodFiles, Programs
from elasticjob_cli.local.processes import Exit, Processes
from elasticjob_cli.local.reconciler import LocalRendezvous, ReconcileLoop
from elasticjob_cli.local.round_log import RoundLog
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.observed.state import Observed
from elasticjob_operator.domain.plan.launch_failures import MOST_LAUNCH_FAILURES
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


def failed(folder: Path, number: int) -> LocalPod:
    """Return a pod whose launcher failed."""
    name = f"job-{number}"
    files = PodFiles(name, f"uid-{number}", 1, folder / "socket", folder / name)
    pod = LocalPod(number, files, datetime.now(UTC))
    pod.launcher_exit = Exit(pod.launcher, 1, 7, 0)
    return pod


@pytest.mark.parametrize("failures", [MOST_LAUNCH_FAILURES - 1, MOST_LAUNCH_FAILURES])
def test_no_pod_is_created_after_the_last_failure_in_a_row(folder: Path, failures: int) -> None:
    async def scenario() -> list[str]:
        rig = Rig(folder, RefusingSource())
        for number in range(failures):
            rig.loop.launcher_ended(failed(folder, number))
        running = asyncio.create_task(rig.loop.run())
        if failures < MOST_LAUNCH_FAILURES:
            async with asyncio.timeout(SECONDS):
                while not rig.created:
                    await asyncio.sleep(0.01)
            rig.loop.killed.set()
            rig.loop.wake()
            await running
        else:
            with pytest.raises(CommandError, match="5 pods ended before they were in a round"):
                await running
        return rig.created

    assert bool(asyncio.run(scenario())) is (failures < MOST_LAUNCH_FAILURES)
