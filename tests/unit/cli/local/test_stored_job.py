"""Object of a local job when a run of the same name follows a former one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.container import Trainer
from elasticjob_cli.local.display import View
from elasticjob_cli.local.job_store import JobFolder, write_json
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.run import LocalRun
from elasticjob_cli.local.stored_job import StoredJob, read_job
from elasticjob_operator.domain.manifests.job_command import program_digest
from elasticjob_operator.model.status import SnapshotsStatus, Status
from elasticjob_operator.model.types import Phase
from tests.unit.operator.builders import job

PROGRAM = program_digest(job())
KEPT = SnapshotsStatus(reached_step=100, program=PROGRAM)
REACHED = Status(phase=Phase.RUNNING, snapshots=KEPT.model_copy(update={"lost_steps": 4}))


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handlers: a run ignores signals at its end, since its process ends."""
    taken = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    before = {signum: signal.getsignal(signum) for signum in taken}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def folder() -> JobFolder:
    metadata = job().metadata
    return JobFolder(metadata.namespace, metadata.name)


def stored(folder: JobFolder) -> StoredJob:
    return StoredJob(job(), folder, lambda: None, pytest.fail)


def started(folder: JobFolder) -> StoredJob:
    """Return the object of a run that holds the lock and has reached step 100."""
    folder.acquire()
    first = stored(folder)
    first.set_status(REACHED)
    return first


def run_again(backend: str = "C10d") -> None:
    """Run the job as `elasticjob run` does, up to the first pod."""
    again = job(rendezvous={"backend": backend}, maxRestarts=7)
    run = LocalRun(again, cast("Trainer", None), cast("View", None), "", False)
    asyncio.run(run.run())


def test_refused_second_run_leaves_the_status_of_the_running_one(folder: JobFolder) -> None:
    started(folder)
    before = folder.status_file.read_bytes()
    with pytest.raises(BadInput, match="is already running on this machine"):
        run_again()
    assert folder.status_file.read_bytes() == before
    folder.release()


def test_run_that_fails_in_its_setup_keeps_the_reached_step_in_its_own_object(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = started(folder)
    folder.release()
    broken = tmp_path / "bin" / "etcd"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")

    with pytest.raises(CommandError, match="did not come up"):
        run_again("Etcd")

    found = read_job(folder)
    assert found.metadata.uid != former.job.metadata.uid
    assert found.spec.max_restarts == 7
    assert found.status == Status(snapshots=KEPT)


def test_former_object_is_only_read_before_its_removal(folder: JobFolder) -> None:
    started(folder)
    before = folder.status_file.read_bytes()
    following = stored(folder)
    following.continue_former()
    assert following.job.status.snapshots == KEPT
    assert folder.status_file.read_bytes() == before
    folder.clear()
    following.save()
    assert read_job(folder) == following.job
    folder.release()


@pytest.mark.parametrize("before", ["another run", "none"])
def test_object_of_a_run_is_there_while_its_supervisor_starts(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before == "another run":
        started(folder)
        folder.release()
    seen: list[int] = []

    async def start(*_: object) -> None:
        seen.append(read_job(folder).spec.max_restarts)
        raise CommandError("no supervisor")

    monkeypatch.setattr(Processes, "open", start)
    with pytest.raises(CommandError, match="no supervisor"):
        run_again()
    assert seen == [7]


def test_object_of_the_former_run_stays_until_it_is_replaced(folder: JobFolder) -> None:
    former = started(folder)
    write_json(folder.rounds_file, [])
    folder.clear()
    assert read_job(folder) == former.job
    assert not folder.rounds_file.exists()
    folder.release()


def test_step_of_another_program_is_not_taken_over(folder: JobFolder) -> None:
    started(folder)
    other = StoredJob(job(launch="PerNode"), folder, lambda: None, pytest.fail)
    other.continue_former()
    assert other.job.status == Status()
    folder.release()


def test_unusable_state_folder_is_reported_with_its_remedy(
    state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state_home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(state_home / "file"))
    with pytest.raises(CommandError, match="set XDG_STATE_HOME to a folder that can"):
        run_again()
