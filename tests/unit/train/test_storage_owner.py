"""Owner of a folder in storage, the job that wrote its snapshots, and the ranks that share it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elasticjob import layout
from elasticjob.train import Restored, SnapshotError, Snapshots
from elasticjob.train.snapshots.core.agreement import (
    MEMORY,
    SHARED,
    STORAGE,
    Part,
    Plan,
    Source,
    Version,
)
from elasticjob.train.snapshots.core.exchange import Exchange, pack_message, unpack_message
from elasticjob.train.snapshots.job import Report
from elasticjob.train.snapshots.memory import part_files
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.storage import calls, storage_folder
from elasticjob.train.snapshots.storage.calls import StorageWrite
from elasticjob.train.snapshots.storage.snapshot_store import SnapshotStore
from elasticjob.train.snapshots.storage.storage_folder import OWNER, OtherOwner, StorageFolder

A, B = "team/a", "team/b"
ERROR = (
    rf"the snapshots are those of job {A}, and this is job {B}: "
    r".* remove the file \"\.elasticjob-owner\""
)


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


def owner(folder: Path) -> str:
    """Return the job in the file with the owner, which keeps its form for other versions."""
    first, job, end = (folder / ".elasticjob-owner").read_text().split("\n")
    assert (first, end) == ("elasticjob-owner 1", "")
    return job


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_folder_belongs_to_the_job_that_stores_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, A, folder, 3)
    assert owner(folder) == A
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


@pytest.mark.parametrize(("job", "lines"), [(A, 0), (B, 1), ("", 0)])
def test_restore_from_the_folder_of_another_job_is_a_warning(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    job: str,
    lines: int,
) -> None:
    """The error of `save` comes after a step, and again after each restart."""
    train(monkeypatch, A, folder, 1)
    monkeypatch.setenv(layout.JOB, job)
    assert Snapshots(folder).restore() is not None
    found = [each.getMessage() for each in caplog.records if "those of job" in each.getMessage()]
    assert len(found) == lines
    assert all(re.search(ERROR, text) and str(folder) in text for text in found)


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
    assert owner(tmp_path / "own") == B


def test_folder_without_its_owner_is_taken_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On purpose, or of an earlier version of the library, which wrote no owner."""
    train(monkeypatch, A, folder, 3)
    (folder / OWNER).unlink()
    found = train(monkeypatch, B, folder, 1)
    assert found is not None
    assert (found.step, found.state) == (3, {"job": A})
    assert owner(folder) == B


def test_process_outside_a_job_uses_any_folder_and_owns_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(monkeypatch, "", folder, 1) is None
    assert not (folder / OWNER).exists()
    train(monkeypatch, A, folder, 1)
    found = train(monkeypatch, "", folder, 1)
    assert found is not None
    assert owner(folder) == A


def made_fifo(path: Path) -> None:
    os.mkfifo(path)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "file": lambda path: path.write_text(f"{A}\n"),
    "empty file": Path.touch,
    "bytes": lambda path: path.write_bytes(b"\xff\0\n"),
    "link": lambda path: path.symlink_to(path.parent / "notes"),
    "fifo": made_fifo,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_file_of_another_program_with_the_name_of_the_owner_is_kept(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], object],
) -> None:
    folder.mkdir()
    (folder / "notes").write_text("of the user")
    make(folder / OWNER)
    before = (folder / OWNER).lstat()
    train(monkeypatch, B, folder, 2)
    after = (folder / OWNER).lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert (folder / "notes").read_text() == "of the user"
    assert caplog.text.count("is not a file of ElasticJob") == 1
    assert str(folder / OWNER) in caplog.text


@pytest.mark.parametrize("name", ["job", "owner"])
def test_entries_of_the_user_are_no_owner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / name).mkdir(parents=True)
    train(monkeypatch, A, folder, 1)
    assert owner(folder) == A


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_folder_of_a_file_system_without_hard_links_has_an_owner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    StorageFolder(folder, A).claim(is_first=True)
    assert owner(folder) == A
    assert [path.name for path in folder.iterdir()] == [OWNER]


@pytest.mark.parametrize("links", [True, False])
def test_first_of_two_jobs_that_begin_together_gets_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Both have found the folder without an owner."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    real = os.fsync
    told: list[str] = []

    def claimed_meanwhile(fd: int) -> None:
        real(fd)
        if not told:
            told.append(A)
            StorageFolder(folder, A).claim(is_first=True)

    monkeypatch.setattr(os, "fsync", claimed_meanwhile)
    with pytest.raises(OtherOwner, match=f"those of job {A}"):
        StorageFolder(folder, B).claim(is_first=True)
    assert owner(folder) == A
    assert [path.name for path in folder.iterdir()] == [OWNER]


def test_owner_can_be_read_by_each_user_who_can_list_the_folder(folder: Path) -> None:
    before = os.umask(0o022)
    try:
        StorageFolder(folder, A).claim(is_first=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / OWNER).stat().st_mode) == 0o644


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_owner_that_cannot_be_read_hides_no_snapshot(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    train(monkeypatch, A, folder, 1)
    real = part_files.opened

    def fail(path: Path, *arguments: int) -> AbstractContextManager[int]:
        if path.name == OWNER:
            raise OSError(number, os.strerror(number))
        return real(path, *arguments)

    monkeypatch.setattr(storage_folder, "opened", fail)
    found = Snapshots(folder).restore()
    assert found is not None
    assert found.step == 1
    with pytest.raises(SnapshotError, match=os.strerror(number)):  # the owner may be another job
        train(monkeypatch, A, folder, 1)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "memory"
    found.mkdir()
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(found))
    return found


def in_memory(memory: Path) -> list[int]:
    return sorted({each.version.step for each in MemoryBuffers(memory, 0).parts()})


def new_node(memory: Path) -> None:
    shutil.rmtree(memory)
    memory.mkdir()


@pytest.mark.parametrize(
    ("owner_of_folder", "job", "steps"),
    [(A, A, [1]), (A, B, []), ("", A, []), ("", "", [1]), (A, "", [1])],
)
def test_memory_gets_the_restored_snapshot_only_of_the_same_job(
    folder: Path,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner_of_folder: str,
    job: str,
    steps: list[int],
) -> None:
    """Storage without an owner, of an earlier version of the library, may be that of any job."""
    train(monkeypatch, owner_of_folder, folder, 1)
    new_node(memory)
    monkeypatch.setenv(layout.JOB, job)
    found = Snapshots(folder).restore()
    assert found is not None
    assert (found.step, found.place) == (1, "storage")
    assert in_memory(memory) == steps


def test_memory_gets_the_restored_snapshot_again_once_the_job_has_stored_one(
    folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(monkeypatch, "", folder, 1)
    monkeypatch.setenv(layout.JOB, A)
    for restored in ([], [2]):  # the first store of the job makes it the owner
        new_node(memory)
        assert Snapshots(folder).restore() is not None
        assert in_memory(memory) == restored
        train(monkeypatch, A, folder, 1)


@pytest.mark.parametrize(("place", "may_keep"), [(STORAGE, False), (MEMORY, True)])
def test_snapshot_with_a_part_in_memory_is_of_the_same_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, may_keep: bool
) -> None:
    monkeypatch.setenv(layout.JOB, A)
    part = Part(Version(1, 7), SHARED, 1, 0)
    plan = Plan(Source(STORAGE, part, (0,)), (Source(place, part._replace(rank=0), (0,)),))
    assert Snapshots(folder)._store.may_keep(plan) == may_keep


class OtherRank(Gang):
    """Gang of two ranks, seen from rank 0; rank 1 knows `job` as its own."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self.size, self._job = 2, job

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        mine = memoryview(bytearray(content))
        if exchange is not Exchange.OFFERS:
            return [mine, mine]
        other = unpack_message(mine)._replace(job=self._job, owner="")
        return [mine, memoryview(bytearray(pack_message(other)))]

    def broadcast(self, body: Body | None, source: int) -> Body:
        assert body is not None
        return body


@pytest.mark.parametrize(("mine", "other"), [("", B), (B, ""), (B, B)])
def test_ranks_of_which_some_do_not_know_their_job_refuse_the_same_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mine: str, other: str
) -> None:
    """After an upgrade of the operator new pods alone have the variable. A rank that trains on
    would wait for the others."""
    train(monkeypatch, A, folder, 1)
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: OtherRank(other))
    with pytest.raises(SnapshotError, match=ERROR):
        train(monkeypatch, mine, folder, 1)


def test_rank_that_does_not_know_its_job_stores_for_the_job_of_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: OtherRank(A))
    train(monkeypatch, "", folder, 1)
    assert owner(folder) == A


@pytest.mark.parametrize("keep", [0, 2])
def test_write_to_a_folder_that_has_become_that_of_another_job_fails(
    folder: Path, keep: int
) -> None:
    """As after a restore that has found the folder without an owner."""
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


GANG = 7


@pytest.mark.parametrize(
    ("stored", "warnings"),
    [((1,), 0), ((2,), 0), ((), 1)],
    ids=["last one", "only the next one", "folder that is not shared"],
)
def test_rank_looks_for_the_last_snapshot_of_rank_0_or_the_next_one(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: tuple[int, ...],
    warnings: int,
) -> None:
    """With `keep=1` rank 0 may have written the next one, and removed the last one, before it."""
    monkeypatch.setattr(calls, "_CACHE_SECONDS", (0.0,))
    gang = Gang()
    gang.rank, gang.size, gang.number = 1, 2, GANG
    store = SnapshotStore(StorageFolder(folder), "", 1, 1, None, Report(), None)
    store.begins(gang, 1, has_ended=True)
    for step in stored:
        part = Part(Version(step, GANG), SHARED, 0, 0)
        StorageFolder(folder).store(part, Body(0, [memoryview(b"x")]))
    store.begins(gang, 2, has_ended=True)
    assert store._lookup is not None
    store._lookup.join()
    store.report_complete()
    assert caplog.text.count("lacks the part of rank 0") == warnings


def test_demanded_snapshot_begins_no_lookup(
    folder: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look for the part of rank 0 before rank 0 has written it, and a network file system
    would go on to answer that there is none."""
    told: list[bool] = []

    def begins(_: SnapshotStore, gang: Gang, step: int, has_ended: bool) -> None:
        told.append(has_ended)

    monkeypatch.setattr(SnapshotStore, "begins", begins)
    snapshots = Snapshots(folder, every_steps=1, store_every=1)
    snapshots.restore()
    snapshots.save(1, {"x": 1})
    with contextlib.suppress(SnapshotError):
        snapshots.save(2, {"x": 2}, store=True)
    assert told == [True, False]
