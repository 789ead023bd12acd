"""Owner of a folder in storage: the job that wrote its snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elasticjob import layout
from elasticjob.train import Restored, SnapshotError, Snapshots
from elasticjob.train.agreement import SHARED, Part, Version
from elasticjob.train.part_files import Body
from elasticjob.train.storage import StorageWrite
from elasticjob.train.storage_folder import OWNER, OtherOwner, StorageFolder

A, B = "team/a", "team/b"
ERROR = rf"the snapshots are those of job {A}, and this is job {B}: .* remove the file \"job\""


@pytest.fixture(autouse=True)
def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(layout.SNAPSHOT_FOLDER, raising=False)
    monkeypatch.delenv(layout.JOB, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def train(patch: pytest.MonkeyPatch, job: str, folder: Path, steps: int) -> Restored | None:
    """Run steps of a job that saves to the folder; return what it restored."""
    patch.setenv(layout.JOB, job)
    snapshots = Snapshots(folder, keep=2)
    found = snapshots.restore()
    first = 1 if found is None else found.step + 1
    for step in range(first, first + steps):
        assert snapshots.save(step, {"job": job}, store=True)
    snapshots.close()
    return found


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_folder_belongs_to_the_job_that_stores_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, A, folder, 3)
    assert (folder / OWNER).read_text() == f"{A}\n"
    found = train(monkeypatch, A, folder, 1)  # the next round, or a job of the same name
    assert found is not None
    assert found.step == 3


def test_job_that_saves_to_the_folder_of_another_one_is_refused_before_it_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, A, folder, 3)
    before = content(folder)
    with pytest.raises(SnapshotError, match=ERROR):
        train(monkeypatch, B, folder, 1)
    assert content(folder) == before


def test_other_job_may_restore_and_train_on_in_a_folder_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    train(monkeypatch, A, folder, 3)
    monkeypatch.setenv(layout.JOB, B)
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(memory))
    for step in (1, 2):  # the start, and a restart
        snapshots = Snapshots(tmp_path / "own")
        found = snapshots.restore() or Snapshots(folder).restore()
        assert found is not None
        assert found.state == {"job": A if step == 1 else B}
        snapshots.save(step, {"job": B}, store=True)
        snapshots.close()
    assert (tmp_path / "own" / OWNER).read_text() == f"{B}\n"


def test_folder_without_its_owner_is_taken_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On purpose, or of an earlier version of the library, which wrote no owner."""
    train(monkeypatch, A, folder, 3)
    (folder / OWNER).unlink()
    found = train(monkeypatch, B, folder, 1)
    assert found is not None
    assert (found.step, found.state) == (3, {"job": A})
    assert (folder / OWNER).read_text() == f"{B}\n"


def test_process_outside_a_job_uses_any_folder_and_owns_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(monkeypatch, "", folder, 1) is None
    assert not (folder / OWNER).exists()
    train(monkeypatch, A, folder, 1)
    found = train(monkeypatch, "", folder, 1)
    assert found is not None
    assert (folder / OWNER).read_text() == f"{A}\n"


@pytest.mark.parametrize("keep", [0, 2])
def test_write_to_a_folder_that_has_become_that_of_another_job_fails(
    folder: Path, keep: int
) -> None:
    """As with two jobs that begin together: both have found the folder without an owner."""
    told: list[int] = []
    part = Part(Version(1, 7), SHARED if keep else 0, 1, 0)
    StorageFolder(folder, A).claim(is_first=True)
    content = Body(0, [memoryview(b"x")])
    write = StorageWrite(StorageFolder(folder, B), [(part, content)], keep, told.append)
    write.start()
    write.end()
    assert f"the snapshots are those of job {A}" in write.trouble
    assert [path.name for path in folder.iterdir()] == [OWNER]
    with pytest.raises(OtherOwner):
        StorageFolder(folder, B).claim(is_first=True)
    shutil.rmtree(folder)
    StorageFolder(folder, B).claim(is_first=False)  # the rank with the shared part writes it
    assert not folder.exists()
