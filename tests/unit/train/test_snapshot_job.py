"""Snapshots of a job: its settings, its memory limit, reports, and planned stops."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticjob import layout, train
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.core.agreement import SHARED, Offer, decide, interval_before
from elasticjob.train.snapshots.job import local_rank
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.part_files import held
from elasticjob.train.snapshots.memory.reached_step import (
    Reached,
    ReachedFile,
    ended_on,
    lost_since,
)

MIB = 2**20


class Job:
    """Files of one worker of a job, as its launcher and its agent provide them."""

    def __init__(self, top: Path, patch: pytest.MonkeyPatch) -> None:
        self.memory, self.storage = top / "memory", top / "storage"
        self.progress, self.request = top / "progress", top / "request"
        self.memory.mkdir()
        self.request.write_bytes(layout.pack_request(None))
        self._patch = patch
        patch.setenv(layout.SNAPSHOT_FOLDER, str(self.memory))
        patch.setenv(layout.PROGRESS_FILE, str(self.progress))
        patch.setenv(layout.REQUEST_FILE, str(self.request))
        self.restart()

    def restart(self) -> None:
        """Forget the files of this process, as a new worker does."""
        self._patch.setattr(train, "_shared", None)
        self.progress.unlink(missing_ok=True)

    def settings(self, **said: Any) -> None:
        self._patch.setenv(layout.SNAPSHOTS, json.dumps(said))

    def started(self, **arguments: Any) -> Snapshots:
        snapshots = Snapshots(**arguments)
        snapshots.restore()
        return snapshots

    def record(self) -> layout.Record:
        found = layout.unpack(self.progress.read_bytes())
        assert found is not None
        return found

    def report(self) -> layout.SnapshotReport:
        found = layout.unpack_report(self.progress.read_bytes())
        assert found is not None
        return found

    def stored(self) -> list[int]:
        folder = self.storage / "demo"
        return [int(path.name[5:17]) for path in sorted(folder.glob("step-*"))]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def of_worker(rank: int, local: int, workers: int, world: int, **others: str) -> dict[str, str]:
    """Return the variables of a worker of torch's agent on the second of two nodes."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": workers,
        "WORLD_SIZE": world,
        "GROUP_RANK": 1,
        "GROUP_WORLD_SIZE": 2,
    }
    return {**{name: str(value) for name, value in names.items()}, **others}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "2"}, 0),
        (of_worker(3, 0, 3, 6, CUDA_VISIBLE_DEVICES="0"), 0),
        (of_worker(5, 0, 3, 6, CUDA_VISIBLE_DEVICES="2"), 2),
        (of_worker(5, 2, 3, 6, CUDA_VISIBLE_DEVICES="0"), 2),  # workers that share a device
        (of_worker(3, 0, 2, 5), 0),
        (of_worker(3, 0, 2, 5, CUDA_VISIBLE_DEVICES="0"), 0),  # nodes with 3 and 2 workers
        (of_worker(3, 0, 3, 6, CUDA_VISIBLE_DEVICES="0,1,2"), 0),
        (of_worker(9, 0, 3, 6, CUDA_VISIBLE_DEVICES="0"), 0),
    ],
)
def test_local_rank_of_a_worker_with_one_visible_device(
    environ: dict[str, str], expected: int
) -> None:
    assert local_rank(environ) == expected


VIRTUAL = """
import os, sys
import torch.distributed as dist
from elasticjob.train import Snapshots

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
snapshots = Snapshots(every_steps=1, replicas=0)
snapshots.restore()
snapshots.save(1, {"x": 1}, dist.get_rank())
snapshots.close()
dist.destroy_process_group()
"""


def test_workers_of_a_node_with_virtual_local_ranks_save_to_one_folder(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    command = [sys.executable, "-c", VIRTUAL, str(tmp_path / "store")]
    workers = []
    for rank in (0, 1):
        own = of_worker(rank, 0, 2, 2, CUDA_VISIBLE_DEVICES=str(rank))
        own.update(GROUP_RANK="0", GROUP_WORLD_SIZE="1")
        environ = {**os.environ, **own, layout.SNAPSHOT_FOLDER: str(memory)}
        workers.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    ended = [(each.communicate(timeout=120)[1], each.returncode) for each in workers]
    assert [code for _, code in ended] == [0, 0], ended
    found = {each.rank for local in (0, 1) for each in MemoryBuffers(memory, local).parts()}
    assert found == {SHARED, 0, 1}


def taken(snapshots: Snapshots, last: int, first: int = 1) -> list[int]:
    """Return the steps at which a snapshot was taken."""
    return [step for step in range(first, last + 1) if snapshots.save(step, {"x": step}, step)]


def test_settings_of_the_job_apply_without_arguments(job: Job) -> None:
    job.settings(everySteps=3, storage={"folder": str(job.storage / "demo"), "keep": 1})
    snapshots = job.started()
    assert taken(snapshots, 9) == [3, 6, 9]
    snapshots.close()
    assert job.stored() == []  # no interval for storage but the default of 500 steps
    assert snapshots.save(10, {"x": 10}, 10, store=True)
    assert job.stored() == [10]


def test_arguments_of_the_script_take_precedence(job: Job, tmp_path: Path) -> None:
    job.settings(everySteps=3, storage={"folder": str(job.storage / "demo"), "everySeconds": 1})
    snapshots = job.started(storage=tmp_path / "other", every_steps=2, store_every=4)
    assert taken(snapshots, 5) == [2, 4]
    snapshots.close()
    assert len(list((tmp_path / "other").iterdir())) == 1
    assert not job.storage.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store_every": 1, "store_seconds": 1}, "not both"),
        ({"store_seconds": 0}, "store_seconds must be above 0"),
        ({"every_steps": 1, "every_seconds": 1}, "not both"),
        ({"store_seconds": "5"}, "store_seconds must be above 0 .* got '5'"),
        ({"every_seconds": "5"}, "every_seconds must be above 0 .* got '5'"),
        ({"max_overhead": "1"}, "max_overhead must be above 0 .* got '1'"),
        ({"replica_rate": "1e6"}, "replica_rate must be above 0, got '1e6'"),
    ],
)
def test_arguments_that_contradict_or_are_no_numbers_are_an_error(
    job: Job, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Snapshots(**arguments)


def test_storage_follows_the_time_since_the_last_stored_snapshot(job: Job) -> None:
    job.settings(
        everySteps=1, storage={"folder": str(job.storage / "demo"), "everySeconds": 100, "keep": 3}
    )
    snapshots = job.started()
    taken(snapshots, 3)
    snapshots.close()
    assert job.stored() == [1]  # the first at once: a fault would begin the interval again
    job.restart()
    snapshots = job.started()
    taken(snapshots, 6, first=4)
    snapshots.close()
    assert job.stored() == [1]
    old = time.time() - 101
    for path in (job.storage / "demo").glob("step-*/*"):
        os.utime(path, (old, old))
    job.restart()
    snapshots = job.started()
    taken(snapshots, 9, first=7)
    snapshots.close()
    assert job.stored() == [1, 7]
    assert job.report().stored == 7


def test_snapshots_in_storage_of_a_later_time_do_not_delay_the_next_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the node that wrote them was fast, or this one has been set back since."""
    folder = str(job.storage / "demo")
    job.settings(everySteps=1, storage={"folder": folder, "everySeconds": 100})
    snapshots = job.started()
    now = time.time()
    clock = [now + 1e6]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    taken(snapshots, 1)
    for path in (job.storage / "demo").glob("step-*/*"):
        os.utime(path, (clock[0], clock[0]))
    for begins in (2, 4):  # the same process, and the next one
        clock[0] = now
        taken(snapshots, begins, first=begins)
        clock[0] = now + 100
        taken(snapshots, begins + 1, first=begins + 1)
        snapshots.close()
        assert job.stored()[-1] == begins + 1
        now -= 1e6
        clock[0] = now
        job.restart()
        snapshots = job.started()


def test_limit_below_two_snapshots_is_reported_and_training_goes_on(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.settings(everySteps=1, memoryBytes=5 * MIB)
    state = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    snapshots = job.started()
    with caplog.at_level(logging.WARNING):
        assert snapshots.save(1, state)
        assert snapshots.save(2, state)
    report = job.report()
    assert (report.trouble, report.step, report.limit) == (layout.NO_ROOM, -1, 5 * MIB)
    assert report.size >= 3 * MIB
    [line] = [record.getMessage() for record in caplog.records]
    assert "memoryLimit is 5242880" in line
    assert "enlarge recovery.snapshots.memoryLimit" in line
    assert list(job.memory.glob("shared.*")) == []
    assert Snapshots().restore() is None


def test_limit_holds_for_the_buffers_of_all_ranks_and_copies(job: Job) -> None:
    job.settings(everySteps=1, memoryBytes=8 * MIB)
    state = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    assert job.started().save(1, state)
    assert job.report().trouble == layout.FITS
    for path in job.memory.glob("shared.*"):
        path.unlink()
    (job.memory / "replica-1.0").write_bytes(bytes(2 * MIB))
    job.restart()
    assert job.started().save(1, state)
    assert job.report().trouble == layout.NO_ROOM


def test_limit_beyond_the_report_is_reported_as_its_maximum(job: Job) -> None:
    job.settings(everySteps=1, memoryBytes=99_999_999 * 2**40)
    assert taken(job.started(), 1) == [1]
    assert (job.report().limit, job.report().trouble) == (layout.MAX_STEP, layout.FITS)


def test_rank_without_parts_reports_the_step_of_the_snapshot(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DDP and two workers on a node local rank 0 writes the state."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    snapshots = job.started(every_steps=1)
    snapshots.save(3, {"x": 3})
    assert (job.report().step, job.report().size) == (3, 0)
    assert list(job.memory.glob("*.0")) == []


def test_state_is_encoded_only_for_a_place(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "")
    snapshots = job.started(storage=job.storage, every_steps=1, store_every=3)
    with pytest.raises(TypeError, match="state"):
        snapshots.save(1, {"x": object()})  # the first one shows the error
    assert snapshots.save(2, {"x": object()})
    with pytest.raises(TypeError, match="state"):
        snapshots.save(3, {"x": object()})


def test_copies_count_once_and_buffers_of_the_same_size_need_no_room(job: Job) -> None:
    job.settings(everySteps=1, memoryBytes=9 * MIB)
    state = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    (job.memory / "replica-1.0").write_bytes(bytes(2 * MIB))
    snapshots = job.started()
    assert taken_with(snapshots, state, 1, 2) == (2, layout.FITS)
    # Copies of a rank that this node no longer holds do not turn its memory off.
    (job.memory / "replica-2.0").write_bytes(bytes(2 * MIB))
    assert taken_with(snapshots, state, 3) == (3, layout.FITS)
    larger = {"x": torch.zeros(4 * MIB, dtype=torch.uint8)}
    assert taken_with(snapshots, larger, 4) == (3, layout.NO_ROOM)
    # Half of the memory that the node needs, not the size of the refused part.
    assert 6 * MIB <= job.report().size < 6 * MIB + 4096


def taken_with(snapshots: Snapshots, state: Any, *steps: int) -> tuple[int, int]:
    """Take snapshots; return the step in memory, and the trouble."""
    for step in steps:
        assert snapshots.save(step, state)
    found = layout.unpack_report((Path(os.environ[layout.PROGRESS_FILE])).read_bytes())
    assert found is not None
    return found.step, found.trouble


@pytest.mark.parametrize(
    ("first", "lost", "lost_ms", "began"),
    [(5, 4, 400, 4), (4, 4, 400, 4), (7, 2, 200, 6), (40, 0, 0, 39)],
)
def test_steps_skipped_by_a_newer_checkpoint_are_not_lost(
    job: Job, first: int, lost: int, lost_ms: int, began: int
) -> None:
    job.settings(everySteps=1)
    report = layout.SnapshotReport(restored=4, lost=4, lost_ms=400)
    train.link().snapshots(report)
    assert job.report().lost == 4
    train.progress(first)
    assert (job.report().lost, job.report().lost_ms) == (lost, lost_ms)
    train.progress(first + 1)
    train.link().snapshots(report._replace(step=first))
    assert (job.report().step, job.report().lost, job.report().lost_ms) == (first, lost, lost_ms)
    assert job.report().restored == began


def test_begin_at_a_newer_checkpoint_is_unknown_with_the_lost_steps(job: Job) -> None:
    job.settings(everySteps=1)
    train.link().snapshots(layout.SnapshotReport(restored=4))
    assert job.report().restored == 4
    train.progress(5)
    assert job.report().restored == 4
    job.restart()
    train.link().snapshots(layout.SnapshotReport(restored=4))
    train.progress(6)
    assert job.report().restored == layout.NO_STEP


def test_begin_is_known_if_the_script_reports_few_of_its_steps(job: Job) -> None:
    job.settings(everySteps=1)
    snapshots = job.started()
    for step in range(1, 11):
        snapshots.save(step, {"x": step})
    train.progress(10)
    assert (job.report().step, job.report().restored) == (10, 0)


def test_report_has_steps_size_and_restored_step(job: Job) -> None:
    job.settings(everySteps=1)
    snapshots = job.started()
    assert job.report()[:8] == (-1, -1, -1, 0, 0, layout.FITS, 0, -1)
    snapshots.save(1, {"x": torch.zeros(1000)}, 4)
    report = job.report()
    assert (report.step, report.size > 4000, report.restored) == (1, True, 0)
    train.progress(1)  # the record before the report is another one
    assert job.report() == report
    record = job.record()
    assert record.step == 1


def test_steps_after_the_restored_snapshot_are_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    job.settings(everySteps=2)
    snapshots = job.started()
    assert job.report().lost == layout.NO_STEP
    for step in range(1, 6):
        snapshots.save(step, {"x": step})
        now[0] += 20_000_000
    job.restart()
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.lost_steps) == (4, 1)
    assert found.lost_seconds == 0.02
    report = job.report()
    assert (report.restored, report.lost) == (4, 1)
    assert report.lost_ms == 20


def test_lost_steps_count_from_the_farthest_rank(tmp_path: Path) -> None:
    assert ended_on(tmp_path / "missing") == []
    for rank, last in enumerate((6, 8)):
        file = ReachedFile(tmp_path, rank)
        for step in range(5, last + 1):
            file.write(step)
    assert sorted(each.reached.step for each in ended_on(tmp_path)) == [6, 8]
    assert lost_since(6, [Reached(), Reached(8, 200_000_000), Reached(7, 1)]) == {
        "restored": 6,
        "lost": 2,
        "lost_ms": 400,
    }
    assert lost_since(9, [Reached(8, 5)])["lost"] == 0
    assert lost_since(3, [Reached()]) == {"restored": 3}
    torn = tmp_path / "reached-1"
    torn.write_bytes(b"!" + torn.read_bytes()[1:])
    assert [each.reached.step for each in ended_on(tmp_path)] == [6]


def checkpoint(job: Job) -> tuple[int, int]:
    """Return the step and the number of the reported checkpoints."""
    record = job.record()
    return record.checkpoint_step, record.checkpoints


def test_periodic_snapshot_in_storage_is_reported_as_a_checkpoint(job: Job) -> None:
    snapshots = job.started(storage=job.storage, every_steps=1, store_every=4)
    taken(snapshots, 4)
    assert snapshots._store.end()
    assert checkpoint(job) == (-1, 0), "the thread that writes does not report"
    snapshots.save(5, {"x": 5}, 5)
    # Scripts that report none themselves are asked to save by save points, not by this number.
    assert checkpoint(job) == (4, 0)
    taken(snapshots, 8, first=6)
    snapshots.close()
    assert checkpoint(job) == (8, 0)


def test_snapshot_that_was_not_requested_is_no_answer_to_a_request(job: Job) -> None:
    train.on_leave(lambda: None)
    snapshots = job.started(storage=job.storage, every_steps=1, store_every=2)
    taken(snapshots, 2)
    assert snapshots._store.end()
    job.request.write_bytes(layout.pack_request(layout.Request(0, 30)))
    snapshots.save(3, {"x": 3}, 3)
    assert checkpoint(job) == (-1, 0)
    job.request.write_bytes(layout.pack_request(None))
    snapshots.save(4, {"x": 4}, 4)
    assert checkpoint(job) == (2, 0)


def asked(job: Job, point: int, seconds: float = 0.3) -> None:
    job.request.write_bytes(layout.pack_request(layout.Request(point, seconds)))


def test_planned_stop_takes_a_last_snapshot_and_stores_it(job: Job) -> None:
    job.settings(everySteps=100, storage={"folder": str(job.storage / "demo"), "everySeconds": 900})
    snapshots = job.started()
    assert not snapshots.save(1, {"x": 1}, 1)
    record = job.record()
    assert record.flags == layout.SAVES | layout.REPORTS | layout.RESUMED  # the agent may ask
    asked(job, point=3)
    assert not snapshots.save(2, {"x": 2}, 2)
    assert snapshots.save(3, {"x": 3}, 3)
    assert job.stored() == [3]
    record = job.record()
    assert (record.checkpoint_step, record.checkpoints) == (3, 1)
    assert snapshots.save(4, {"x": 4}, 4) is False  # the stop did not come


def answered(job: Job) -> int:
    """Return the points passed at the last answer."""
    answer = layout.unpack_answer(job.progress.read_bytes())
    assert answer is not None
    return answer.saved


def test_planned_stop_keeps_the_state_in_memory_without_storage(job: Job) -> None:
    snapshots = job.started(every_steps=100)
    assert not snapshots.save(1, {"x": 1}, 1)
    record = job.record()
    assert record.flags == layout.KEEPS | layout.RESUMED
    asked(job, point=3)
    assert not snapshots.save(2, {"x": 2}, 2)
    assert answered(job) == 0
    assert snapshots.save(3, {"x": 3}, 3)
    assert answered(job) == 3
    assert checkpoint(job) == (-1, 0)  # memory is no checkpoint
    assert snapshots.save(4, {"x": 4}, 4) is False  # the stop did not come
    snapshots.close()
    found = train.Snapshots(every_steps=100).restore()
    assert found is not None
    assert (found.step, found.place) == (3, "memory")


@pytest.mark.parametrize("stores", [True, False])
def test_snapshot_before_a_planned_stop_keeps_the_interval_of_the_regular_ones(
    job: Job, stores: bool
) -> None:
    storage = {"folder": str(job.storage / "demo"), "everySeconds": 900}
    job.settings(everySteps=10, **({"storage": storage} if stores else {}))
    snapshots = job.started()
    taken(snapshots, 11)
    asked(job, point=13, seconds=0.05)
    assert [snapshots.save(step, {"x": step}, step) for step in (12, 13)] == [False, True]
    snapshots.close()
    offers = [Offer(memory=tuple(MemoryBuffers(job.memory, 0).parts()))]
    plan = decide(offers)
    assert plan is not None
    assert (plan.version.step, interval_before(plan, offers)) == (13, 10)


def test_closed_snapshots_offer_to_keep_nothing(job: Job) -> None:
    snapshots = job.started(every_steps=100)
    snapshots.save(1, {"x": 1}, 1)
    assert job.record().flags == layout.KEEPS | layout.RESUMED
    snapshots.close()
    assert job.record().flags == layout.RESUMED


def test_state_that_turns_out_to_be_on_a_device_is_kept_before_planned_stops(job: Job) -> None:
    """The optimizers are unknown at the restore."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device="meta"))])
    snapshots = job.started(every_seconds=1000, optimizers=lambda: optimizer)
    for step in range(1, 40):
        snapshots.save(step, {"x": step}, step)
    assert job.record().flags == layout.KEEPS | layout.RESUMED


def test_time_to_save_before_a_planned_stop_counts_from_the_request(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = train.link()
    assert link.stop_seconds == 0.0
    asked(job, point=5, seconds=30.0)
    now = time.monotonic()
    for passed in (0.0, 10.0):
        monkeypatch.setattr(time, "monotonic", lambda passed=passed: now + passed)
        assert not link.stops_unasked(in_memory=True)
        assert link.stop_seconds == 30.0 - passed


def test_held_state_needs_no_save_before_a_planned_stop(job: Job) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    snapshots = job.started(every_steps=100, optimizers=optimizer)
    snapshots.save(1, {"x": torch.zeros(2)})
    record = job.record()
    assert record.points == 0


def test_failed_last_snapshot_does_not_end_the_training(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.settings(everySteps=100, storage={"folder": str(job.storage / "demo"), "everySeconds": 900})
    snapshots = job.started()
    job.storage.write_text("a file")
    asked(job, point=1)
    assert snapshots.save(1, {"x": 1}, 1)
    assert "the snapshot is not in storage" in caplog.text
    record = job.record()
    assert record.checkpoints == 0
    answer = layout.unpack_answer(job.progress.read_bytes())
    assert answer is not None
    assert (answer.saved, answer.failed) == (0, 1)
    assert answer.error.startswith(f"rank 0: {job.storage}/demo: ")
    with pytest.raises(SnapshotError):
        snapshots.save(2, {"x": 2}, 2, store=True)


def test_script_that_catches_the_error_of_its_last_save_reports_it(job: Job) -> None:
    job.settings(everySteps=1)
    snapshots = job.started(storage=job.storage)
    job.storage.write_text("a file")
    asked(job, point=1, seconds=600)  # beyond the time limit of this test
    with pytest.raises(SnapshotError):
        snapshots.save(1, {"x": 1}, 1, store=train.should_checkpoint())
    answer = layout.unpack_answer(job.progress.read_bytes())
    assert answer is not None
    assert answer.failed == 1
    assert snapshots.save(2, {"x": 2}, 2, store=train.should_checkpoint())
    job.restart()
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.place) == (2, "memory")


def test_training_continues_until_the_stop_after_a_failed_last_snapshot(job: Job) -> None:
    job.settings(everySteps=100, storage={"folder": str(job.storage / "demo"), "everySeconds": 900})
    snapshots = job.started()
    job.storage.write_text("a file")
    asked(job, point=1, seconds=600)  # beyond the time limit of this test
    assert snapshots.save(1, {"x": 1}, 1)
    assert not snapshots.save(2, {"x": 2}, 2)
    assert not snapshots.save(3, {"x": 3}, 3)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("way", ["asks", "callback"])
def test_script_that_saves_by_itself_is_not_asked_twice(job: Job, way: str, stores: bool) -> None:
    storage = {"folder": str(job.storage / "demo"), "everySeconds": 900}
    job.settings(everySteps=100, **({"storage": storage} if stores else {}))
    snapshots = job.started()
    if way == "asks":
        assert not train.should_checkpoint()
    else:
        train.on_leave(lambda: None)
    asked(job, point=2, seconds=0.05)
    assert [snapshots.save(step, {"x": step}, step) for step in (1, 2, 3)] == [False] * 3
    assert job.stored() == []


def test_read_only_memory_leaves_the_job_running(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.settings(everySteps=1)
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "/proc/self/fdinfo")
    snapshots = job.started()
    assert snapshots.save(1, {"x": 1}, 1)
    assert snapshots.save(2, {"x": 2}, 2)
    state, error = layout.trouble_of(job.report().trouble)
    assert state == layout.UNUSABLE
    assert error in (errno.ENOENT, errno.EACCES)
    assert len(caplog.records) == 1
    assert "no more snapshots in the memory of this node" in caplog.text


@pytest.mark.parametrize("local_rank", [0, 1])
def test_folder_that_the_launcher_cannot_create_is_reported_and_logged_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: int
) -> None:
    job.settings(everySteps=1)
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "")
    monkeypatch.setenv(layout.SNAPSHOT_TROUBLE, f"{errno.EROFS} /dev/shm")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    snapshots = job.started()
    assert taken(snapshots, 2) == [1]  # without storage there is no place for others
    assert layout.trouble_of(job.report().trouble) == (layout.UNUSABLE, errno.EROFS)
    assert job.report().step == layout.NO_STEP
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "no snapshots in the memory of this node: cannot create a folder in /dev/shm: Read-only "
        "file system. Training goes on without snapshots of this node"
    ] * (local_rank == 0)


@pytest.mark.parametrize("trouble", ["", "no number", "\u00b2 /dev/shm"])
def test_memory_that_is_turned_off_is_not_reported_as_trouble(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, "")
    monkeypatch.setenv(layout.SNAPSHOT_TROUBLE, trouble)
    snapshots = job.started(every_steps=1)
    assert taken(snapshots, 1) == [1]
    assert job.report().trouble == layout.FITS
    assert caplog.records == []


@pytest.fixture
def small_memory(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Memory of 5 MiB: a real file system as root, else an allocation with that limit."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(job.memory)]
    is_real = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    allocate = os.posix_fallocate

    def limited(fd: int, offset: int, size: int) -> None:
        held = sum(path.stat().st_blocks * 512 for path in job.memory.iterdir())
        if held + size > 5 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, size)

    if not is_real:
        monkeypatch.setattr(os, "posix_fallocate", limited)
    yield job.memory
    if is_real:
        subprocess.run(["umount", str(job.memory)], check=True)


def test_memory_that_holds_one_snapshot_is_reported_and_keeps_it(
    job: Job, small_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job.settings(everySteps=1)
    snapshots = job.started()
    state = {"x": torch.zeros(3 * MIB, dtype=torch.uint8)}
    assert taken_with(snapshots, state, 1) == (1, layout.FITS)
    assert taken_with(snapshots, state, 2, 3) == (1, layout.NO_ROOM)
    assert len(caplog.records) == 1
    assert "enlarge /dev/shm" in caplog.text
    job.restart()
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.lost_steps) == (1, 2)


def test_memory_that_fills_up_at_run_time_keeps_the_last_snapshot(
    job: Job, small_memory: Path
) -> None:
    """A data loader fills the memory, then a larger state needs more of it."""
    job.settings(everySteps=1)
    snapshots = job.started()
    assert taken_with(snapshots, {"x": torch.zeros(1000)}, 1, 2) == (2, layout.FITS)
    (small_memory / "other").write_bytes(bytes(4 * MIB))
    large = {"x": torch.zeros(2 * MIB, dtype=torch.uint8)}
    assert taken_with(snapshots, large, 3, 4) == (2, layout.NO_ROOM)
    job.restart()
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 2


def test_parts_of_former_workers_stay_until_the_gang_has_its_own(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node had two workers, and continues with one."""
    job.settings(everySteps=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    taken(job.started(), 2)
    for number in (0, 1):  # of the other worker
        shutil.copy(job.memory / f"rank-0.{number}", job.memory / f"rank-1.{number}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    job.restart()
    snapshots = Snapshots()
    assert snapshots.restore() is not None
    [left] = job.memory.glob("rank-1.*")
    part = held(left)
    assert part is not None
    assert part.version.step == 2, "the restored version stays"
    assert snapshots.save(3, {"x": 3}, 3)
    assert left.exists()
    assert snapshots.save(4, {"x": 4}, 4)
    assert list(job.memory.glob("rank-1.*")) == []


def test_file_of_an_earlier_release_has_no_report(job: Job) -> None:
    train.progress(1)
    assert layout.unpack_report(job.progress.read_bytes()) is None
    job.started(every_steps=1)
    content = job.progress.read_bytes()
    content = content[: layout.RECORD_BYTES + layout.REPORT_BYTES]
    assert layout.unpack_report(content) is not None
    assert layout.unpack_report(content[: layout.RECORD_BYTES]) is None
    assert layout.unpack_report(content[:-1]) is None
    assert layout.unpack_report(content[:-1] + b"\x7f") is None
