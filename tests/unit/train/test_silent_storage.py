"""Storage of snapshots that does not answer, or cannot be read."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from elasticjob import layout, train
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots import restoring
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.memory import part_files
from elasticjob.train.snapshots.memory.part_files import Body, read
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.storage import calls
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder
from tests.hanging_storage import HangingStorage
from tests.paths import ROOT
from tests.unit.train.test_snapshot_job import MIB, Job, asked, checkpoint, job

__all__ = ["job"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that shortens the waits, to be called once no healthy write follows."""

    def shortened() -> None:
        monkeypatch.setattr(calls, "SILENT_SECONDS", 0.5)
        monkeypatch.setattr(calls, "SOON_SECONDS", 0.1)

    return shortened


def storage_trouble(job: Job) -> int:
    return layout.storage_trouble_of(job.report().trouble)


def restored(*arguments: Any) -> tuple[int, str] | None:
    found = Snapshots(*arguments).restore()
    return None if found is None else (found.step, found.place)


def saves_until(snapshots: Snapshots, condition: Callable[[], bool], step: int) -> int:
    """Take a snapshot each step until the condition holds; return the last step."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        step += 1
        assert snapshots.save(step, {"x": step})
        time.sleep(0.01)
    return step


def test_hanging_storage_costs_only_the_stores_until_it_answers(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short: Callable[[], None],
) -> None:
    caplog.set_level(logging.WARNING)
    silent_seconds = calls.SILENT_SECONDS
    snapshots = job.started(storage=job.storage, every_steps=1, store_every=2)
    disk = HangingStorage(job.storage)
    short()
    # The report comes after half a second; training goes on past the next snapshots for storage.
    step = saves_until(
        snapshots,
        lambda: storage_trouble(job) == errno.ETIMEDOUT and job.report().step > 4,
        0,
    )
    assert caplog.text.count("does not answer") == 1
    assert (job.report().step, job.report().stored) == (step, -1)
    assert layout.trouble_of(job.report().trouble) == (layout.FITS, 0)
    with pytest.raises(SnapshotError, match=r"rank 0: .*the storage does not answer"):
        snapshots.save(step, {"x": step}, store=True)

    monkeypatch.setattr(calls, "SILENT_SECONDS", silent_seconds)
    disk.answer()
    step = saves_until(snapshots, lambda: job.report().stored > 2, step)
    snapshots.close()
    assert "answers again" in caplog.text
    assert storage_trouble(job) == 0
    assert snapshots.save(step, {"x": step}, store=True)
    for path in job.memory.iterdir():
        path.unlink()
    job.restart()
    assert restored(job.storage) == (step, "storage")


def test_planned_stop_with_hanging_storage_goes_on_without_the_snapshot(
    job: Job, caplog: pytest.LogCaptureFixture, short: Callable[[], None]
) -> None:
    job.settings(everySteps=100, storage={"folder": str(job.storage), "everySeconds": 900})
    snapshots = job.started()
    HangingStorage(job.storage)
    short()
    asked(job, point=1)
    assert snapshots.save(1, {"x": 1})
    assert "The job stops without it" in caplog.text
    assert checkpoint(job) == (-1, 0)
    assert job.report().step == 1, "it is in memory"


SCRIPT = """
import sys
from pathlib import Path
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.storage import calls
from tests.hanging_storage import HangingStorage

snapshots = Snapshots(sys.argv[1], every_steps=1, store_every=1)
snapshots.restore()
if sys.argv[2] == "hangs":
    calls.SILENT_SECONDS = 0.5
    HangingStorage(Path(sys.argv[1]))
snapshots.save(1, {"x": 1})
print("trained", flush=True)
"""


@pytest.mark.parametrize(("disk", "found"), [("hangs", None), ("answers", (1, "storage"))])
def test_process_ends_with_its_write_unless_storage_hangs(
    tmp_path: Path, disk: str, found: Any
) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sdk")))}
    folder = tmp_path / "storage"
    command = [sys.executable, "-c", SCRIPT, str(folder), disk]
    ended = subprocess.run(
        command, env=env, check=True, capture_output=True, text=True, timeout=240
    )
    assert ended.stdout == "trained\n"
    if disk == "hangs":
        assert not list(folder.glob("step-*/shared"))
    else:
        assert restored(folder) == found


def unlisted(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file in the place of the folder")


@pytest.mark.parametrize("broken", [unlisted, HangingStorage])
def test_memory_suffices_if_storage_cannot_be_read(
    job: Job,
    caplog: pytest.LogCaptureFixture,
    short: Callable[[], None],
    broken: Callable[[Path], object],
) -> None:
    snapshots = job.started(storage=job.storage, every_steps=1)
    snapshots.save(1, {"x": 1}, store=True)
    snapshots.save(2, {"x": 2})
    broken(job.storage)
    if broken is HangingStorage:
        short()
    del snapshots
    job.restart()
    again = Snapshots(job.storage, every_steps=1)
    found = again.restore()
    assert found is not None
    assert (found.step, found.place, found.lost_steps) == (2, "memory", 0)
    assert "the storage of snapshots cannot be read" in caplog.text
    assert "Training continues at step 2, from memory" in caplog.text
    assert again.save(3, {"x": 3})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(unlisted, "Not a directory"), (HangingStorage, "the storage does not answer")],
)
def test_storage_that_cannot_be_read_is_an_error_without_memory(
    job: Job, short: Callable[[], None], broken: Callable[[Path], object], reason: str
) -> None:
    job.started(storage=job.storage, every_steps=1).save(1, {"x": 1}, store=True)
    for path in job.memory.iterdir():
        path.unlink()
    broken(job.storage)
    if broken is HangingStorage:  # an answer may be late
        short()
    with pytest.raises(SnapshotError, match=rf"no complete snapshot in memory.*{reason}"):
        Snapshots(job.storage).restore()


def unreadable(
    monkeypatch: pytest.MonkeyPatch, call: str, folder: Path, steps: Collection[int]
) -> None:
    """Let this call fail for the files of these steps in storage."""
    real = getattr(os, call)

    def damaged(fd: int, *arguments: Any) -> Any:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_relative_to(folder) and int(path.parent.name[5:17]) in steps:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    monkeypatch.setattr(os, call, damaged)


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_file_in_storage_that_cannot_be_read_is_not_taken_for_an_absent_one(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    snapshots = job.started(storage=job.storage, every_steps=1, keep=3)
    for step in (1, 2, 3):
        snapshots.save(step, {"x": step}, store=True)
    for path in job.memory.iterdir():
        path.unlink()
    steps = {3}
    unreadable(monkeypatch, call, job.storage, steps)
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "")
    assert restored(job.storage) == (2, "storage")
    assert "Input/output error" in caplog.text
    steps |= {1, 2}
    with pytest.raises(SnapshotError, match=r"storage cannot be read .*Input/output error"):
        Snapshots(job.storage).restore()


def test_checksum_of_a_part_in_storage_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: a large part must not count as storage that does not answer."""
    part = Part(Version(1, 1), SHARED, 0, 0)
    folder = StorageFolder(tmp_path)
    folder.store(part, Body(0, [memoryview(bytes(range(100)))]))
    (path,) = tmp_path.glob("*/shared")
    calls: list[int | str] = []
    real = zlib.crc32

    def counted(content: memoryview, before: int = 0) -> int:
        calls.append(memoryview(content).nbytes)
        return real(content, before)

    monkeypatch.setattr(zlib, "crc32", counted)
    monkeypatch.setattr(part_files, "_SLICE_BYTES", 40)
    body = read(path, part, lambda: calls.append("progress"))
    assert bytes(body.views[0]) == bytes(range(100))
    assert calls[calls.index("progress") - 1 :] == [40, "progress", 40, "progress", 20, "progress"]


def test_part_that_storage_does_not_deliver_is_an_error_and_not_an_older_snapshot(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = job.started(storage=job.storage, every_steps=1)
    for step in (1, 2):
        snapshots.save(step, {"x": step}, store=True)
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "")
    answers, real = threading.Event(), os.preadv

    def hanging(fd: int, *arguments: Any) -> int:
        if "step-000000000002-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            assert answers.wait(120)
        return real(fd, *arguments)

    monkeypatch.setattr(os, "preadv", hanging)
    with monkeypatch.context() as patch:

        def called(work: Callable[..., Any]) -> Any:
            patch.setattr(calls, "SILENT_SECONDS", 0.5)  # the listing has ended
            return calls.called(work)

        patch.setattr(restoring, "called", called)
        with pytest.raises(SnapshotError, match=r"step 2 is in storage, which does not answer"):
            Snapshots(job.storage).restore()
    answers.set()
    assert restored(job.storage) == (2, "storage")


def test_version_that_cannot_be_read_does_not_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the newest complete one, once the disk recovers."""
    monkeypatch.delenv(layout.SNAPSHOT_FOLDER, raising=False)
    snapshots = Snapshots(tmp_path, every_steps=1, keep=1)
    snapshots.restore()
    snapshots.save(1, {"x": 1}, store=True)
    real, folder = os.pread, StorageFolder(tmp_path)

    def damaged(fd: int, *arguments: Any) -> Any:
        if "step-000000000001-" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", damaged)
        for step in (2, 3, 4):
            snapshots.save(step, {"x": step}, store=True)
    assert {part.version.step for part in folder.parts()} == {1, 4}


def slow_listing(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.5) -> None:
    """Let each listing of storage outlast the short wait of a restore."""
    real = StorageFolder._versions

    def versions(folder: StorageFolder) -> Any:
        time.sleep(seconds)
        yield from real(folder)

    monkeypatch.setattr(StorageFolder, "_versions", versions)
    monkeypatch.setattr(calls, "SOON_SECONDS", 0.1)


def outgrown(job: Job) -> Snapshots:
    """Return snapshots with step 1 in memory, which has no room for step 2, in storage."""
    job.settings(everySteps=1, memoryBytes=MIB)
    snapshots = job.started(storage=job.storage)
    assert snapshots.save(1, {"x": bytes(MIB // 4)}, store=True)
    assert snapshots.save(2, {"x": bytes(4 * MIB)}, store=True)
    job.restart()
    return snapshots


def test_restore_waits_for_storage_that_is_newer_than_memory(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgrown(job)
    slow_listing(monkeypatch)
    assert restored(job.storage) == (2, "storage")


def test_restore_waits_for_storage_that_is_newer_than_memory_also_after_a_second_fault(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgrown(job)
    again = Snapshots(job.storage, store_every=100)
    assert again.restore() is not None
    assert again.save(3, {"x": bytes(4 * MIB)})
    slow_listing(monkeypatch)
    job.restart()
    assert restored(job.storage) == (2, "storage")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(unlisted, "Not a directory"), (HangingStorage, "the storage does not answer")],
)
def test_memory_older_than_storage_that_cannot_be_read_is_an_error(
    job: Job, short: Callable[[], None], broken: Callable[[Path], object], reason: str
) -> None:
    outgrown(job)
    broken(job.storage)
    if broken is HangingStorage:
        short()
    with pytest.raises(SnapshotError, match=rf"step 2 is in storage.*{reason}.*go on at step 1"):
        Snapshots(job.storage).restore()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_memory_older_than_a_file_in_storage_that_cannot_be_read_is_an_error(
    job: Job, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    outgrown(job)
    unreadable(monkeypatch, call, job.storage, {2})
    with pytest.raises(SnapshotError, match=r"step 2 is in storage.*Input/output error"):
        Snapshots(job.storage).restore()


def test_restore_waits_for_the_ranks_own_state_in_storage(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.started(storage=job.storage, every_steps=1).save(1, {"x": 1}, "own", store=True)
    for path in job.memory.glob("rank-*"):
        path.unlink()
    slow_listing(monkeypatch)
    found = Snapshots(job.storage).restore()
    assert found is not None
    assert (found.step, found.rank_state) == (1, "own")


def test_listing_that_ends_right_after_the_wait_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is that of the next wait."""
    part = Part(Version(1, 1), SHARED, 0, 0)
    StorageFolder(tmp_path).store(part, Body(0, [memoryview(b"x")]))
    offer = calls.StoredOffer(StorageFolder(tmp_path))
    listing = offer._call
    assert listing is not None
    with monkeypatch.context() as patch:
        # The wait is over before the listing, which ends before its result is taken.
        def late(_: float) -> bool:
            listing.join()
            return False

        patch.setattr(listing, "has_ended", late)
        offer.update(is_patient=False)
    assert (offer.is_silent, dict(offer.parts)) == (True, {})
    offer.update(is_patient=True)
    assert (offer.is_silent, list(offer.parts)) == (False, [part])


def test_store_without_storage_is_an_error_at_the_first_call(job: Job) -> None:
    snapshots = job.started(every_steps=1)
    with pytest.raises(SnapshotError, match=r"set recovery\.snapshots\.storage"):
        snapshots.save(1, {"x": 1}, store=True)
    assert snapshots.save(1, {"x": 1})


def test_unused_store_without_storage_is_one_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """The first planned stop would make it an error."""
    snapshots = job.started(every_steps=1)
    for step in (1, 2):
        assert snapshots.save(step, {"x": step}, store=train.should_checkpoint())
    assert caplog.text.count("there is no storage for save(store=...)") == 1


def test_unused_store_without_storage_and_without_a_job_is_no_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same script runs under torchrun, where `should_checkpoint` is always False."""
    for name in (layout.PROGRESS_FILE, layout.REQUEST_FILE, layout.SNAPSHOT_FOLDER):
        monkeypatch.delenv(name)
    job.restart()
    assert job.started().save(1, {"x": 1}, store=train.should_checkpoint())
    assert caplog.text == ""


def test_memory_alone_needs_no_exchange_between_ranks(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = job.started(every_steps=1, store_every=1)
    exchanges, real = [], Gang.gather

    def counted(gang: Gang, exchange: Exchange, content: bytes) -> Any:
        exchanges.append(exchange)
        return real(gang, exchange, content)

    monkeypatch.setattr(Gang, "gather", counted)
    for step in range(1, 4):
        assert snapshots.save(step, {"x": step})
    assert exchanges == []


FORKED = """
import multiprocessing, sys, time
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.storage import storage_folder

real = storage_folder.StorageFolder.store

def slow(*arguments):
    time.sleep(2)
    real(*arguments)

def train():
    storage_folder.StorageFolder.store = slow
    snapshots = Snapshots(sys.argv[1], every_steps=1, store_every=1)
    snapshots.restore()
    snapshots.save(1, {"x": 1})

process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def test_process_of_multiprocessing_ends_with_its_write(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
    folder = tmp_path / "storage"
    command = [sys.executable, "-c", FORKED, str(folder)]
    subprocess.run(command, env=env, check=True, timeout=240)
    assert restored(folder) == (1, "storage")
