"""Workers' training progress: reading, reporting, and location of the files."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from elasticjob.layout import (
    MAX_METRICS,
    MAX_STEP,
    NO_ROOM,
    Loss,
    SnapshotReport,
    pack,
    pack_names,
    pack_report,
    unusable,
    with_storage,
)
from elasticjob_agent.core.commands import ReportLocal
from elasticjob_agent.core.events import WorkersProgressed
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.reports import BUSY_METRIC, CHECKPOINT_SECONDS, STEP_SECONDS
from elasticjob_agent.core.step import wake_at
from elasticjob_agent.worker_files import ProgressFiles
from elasticjob_launcher.settings import LIBRARY, library_beside, worker_environment
from elasticjob_rendezvous.protocol.records.members import Snapshots, SnapshotTrouble
from tests.unit.agent.builders import Driven, run, running, started, stopped

UTC_MS = 1_700_000_000_000


def said(step: int, checkpoint: int = -1, number: int = 1, **first: int) -> WorkersProgressed:
    """Return an event with both ranks at one step; `first` gives the times of their first steps."""
    one = WorkerProgress(step, UTC_MS, checkpoint, first_step_ms=first.get("one"))
    other = WorkerProgress(step, UTC_MS, checkpoint, first_step_ms=first.get("other"))
    return WorkersProgressed(number, {0: one, 1: other}, UTC_MS)


def told(driven: Driven, event: WorkersProgressed, after: float = 0.1) -> tuple[int, int] | None:
    """Return the step and checkpoint that this event reports to the rendezvous, if any."""
    orders = driven.only(ReportLocal, driven.feed(event, after))
    return (orders[-1].local.step, orders[-1].local.checkpoint_step) if orders else None


def test_first_progress_is_reported_at_once_and_later_progress_periodically() -> None:
    driven = running()
    assert told(driven, said(1)) == (1, -1)
    assert told(driven, said(2), after=STEP_SECONDS / 2) is None
    assert driven.state.group is not None
    assert driven.state.group.progress[0].step == 2, "here everything is known"
    assert wake_at(driven.state) == pytest.approx(driven.now + STEP_SECONDS / 2)
    assert told(driven, said(3), after=STEP_SECONDS / 2) == (3, -1)


def test_checkpoint_is_reported_sooner_than_step() -> None:
    driven = running()
    told(driven, said(1))
    assert told(driven, said(2, checkpoint=2), after=CHECKPOINT_SECONDS) == (2, 2)
    assert told(driven, said(3, checkpoint=3), after=CHECKPOINT_SECONDS / 2) is None


def test_progress_of_older_round_is_ignored() -> None:
    driven = running(number=2)
    assert told(driven, said(9, number=1)) is None
    assert driven.state.group is not None
    assert driven.state.group.progress == {}


def test_ended_round_has_no_step() -> None:
    driven = running()
    told(driven, said(1))
    orders = driven.only(ReportLocal, driven.feed(stopped()))
    assert (orders[-1].local.step, orders[-1].local.checkpoint_step) == (-1, -1)
    assert wake_at(driven.state) is None


def test_first_step_time_counts_from_start_until_all_workers_made_it() -> None:
    driven = running()
    driven.feed(said(1, one=UTC_MS - 400), after=1.0)
    assert driven.state.group is not None
    assert driven.state.group.first_step_ms == 0
    driven.feed(said(1, one=UTC_MS - 400, other=UTC_MS - 100), after=0.0)
    assert driven.state.group.first_step_ms == pytest.approx(900, abs=1)
    assert driven.only(ReportLocal)[-1].local.first_step_ms == driven.state.group.first_step_ms
    driven.feed(said(2, one=UTC_MS - 400, other=UTC_MS), after=1.0)
    assert driven.state.group.first_step_ms == pytest.approx(900, abs=1), "it is known once"


# -- snapshots ----------------------------------------------------------------------


def snapped(step: int, one: SnapshotReport, other: SnapshotReport) -> WorkersProgressed:
    """Return an event with both ranks at one step, with these reports."""
    workers = {
        rank: WorkerProgress(step, UTC_MS, first_step_ms=UTC_MS, snapshots=report)
        for rank, report in enumerate((one, other))
    }
    return WorkersProgressed(1, workers, UTC_MS)


def test_snapshots_of_a_node_are_those_that_all_its_workers_have() -> None:
    driven = running()
    one = SnapshotReport(9, 8, 7, 1, 100, restored=4, limit=900)
    other = SnapshotReport(8, -1, 6, 1, 50, restored=4, limit=900)
    driven.feed(snapped(9, one, other))
    assert driven.only(ReportLocal)[-1].local.snapshots == Snapshots(8, 8, 6, 1, 4, 150, 900)
    trouble = other._replace(trouble=NO_ROOM, step=-1)
    orders = driven.only(ReportLocal, driven.feed(snapped(10, one, trouble), STEP_SECONDS))
    assert orders[-1].local.snapshots == Snapshots(
        -1, 8, 6, 1, 4, 50, 900, SnapshotTrouble.NO_ROOM
    ), "the worker without room reports the needs of its node"
    refused = other._replace(trouble=unusable(errno.EROFS), step=-1)
    orders = driven.only(ReportLocal, driven.feed(snapped(11, trouble, refused), STEP_SECONDS))
    found = orders[-1].local.snapshots
    assert found is not None
    assert (found.trouble, found.error) == (SnapshotTrouble.UNUSABLE, errno.EROFS)
    assert found.storage_error == 0
    silent = refused._replace(trouble=with_storage(refused.trouble, errno.ETIMEDOUT))
    orders = driven.only(ReportLocal, driven.feed(snapped(12, one, silent), STEP_SECONDS))
    found = orders[-1].local.snapshots
    assert found is not None
    assert (found.trouble, found.error) == (SnapshotTrouble.UNUSABLE, errno.EROFS)
    assert found.storage_error == errno.ETIMEDOUT
    driven.feed(stopped())
    assert driven.only(ReportLocal)[-1].local.snapshots is None


def test_lost_steps_are_reported_with_the_first_step_of_all_workers() -> None:
    driven = running()
    lost = SnapshotReport(restored=4, lost=2, lost_ms=300, loss=Loss.STEPS_SKIPPED)
    early = WorkersProgressed(1, {0: WorkerProgress(snapshots=lost)}, UTC_MS)
    driven.feed(early)
    local = driven.only(ReportLocal)[-1].local
    assert (local.lost_steps, local.lost_ms, local.lost_reason) == (-1, 0, "")
    driven.feed(snapped(5, lost, SnapshotReport(restored=4)), after=0.1)
    local = driven.only(ReportLocal)[-1].local
    assert local.first_step_ms
    assert (local.lost_steps, local.lost_ms, local.lost_reason) == (2, 300, "StepsSkipped")


def test_snapshots_are_reported_with_the_first_step_of_all_workers() -> None:
    driven = running()
    driven.feed(WorkersProgressed(1, {rank: WorkerProgress() for rank in range(2)}, UTC_MS))
    restored = SnapshotReport(restored=500)
    workers = {rank: WorkerProgress(snapshots=restored) for rank in range(2)}
    driven.feed(WorkersProgressed(1, workers, UTC_MS), after=0.1)
    driven.feed(snapped(501, restored, restored), after=0.1)
    local = driven.only(ReportLocal)[-1].local
    assert local.first_step_ms
    assert local.step == 501
    assert local.snapshots is not None
    assert local.snapshots.restored == 500
    assert told(driven, snapped(502, restored, restored)) is None, "later steps wait"


def test_report_in_the_progress_file_is_bounded(tmp_path: Path) -> None:
    files = ProgressFiles(tmp_path)
    files.prepare(1, slots=1)
    record = pack(0, 0, 3, 1, 1, -1, 0, 0, [0.0] * MAX_METRICS, pack_names(()))
    huge = SnapshotReport(-9, 5, -(2**63), 10**9, 2**64 - 1, 77, 2, -9, 2**63, 2**64 - 1)
    files.file(1, 0).write_bytes(record + pack_report(huge))
    found = files.read(1, 1)[0]
    assert found.step == 3
    assert found.snapshots == (-1, 5, -1, 1000, MAX_STEP, 77, 2, -1, 2**50, MAX_STEP, Loss.UNKNOWN)
    files.file(1, 0).write_bytes(record)
    assert files.read(1, 1)[0].snapshots is None


def test_last_step_of_an_ended_round_is_reported_until_the_next_one_ends() -> None:
    driven = running()
    told(driven, said(1))
    driven.feed(said(9), after=0.1)
    assert driven.state.reported is not None
    assert (driven.state.reported.ended_round, driven.state.reported.ended_step) == (0, -1)
    local = driven.only(ReportLocal, driven.feed(stopped()))[-1].local
    assert (local.ended_round, local.ended_step) == (1, 9)
    driven.feed(run(2))
    driven.feed(started(2))
    told(driven, said(5, number=2))
    assert (driven.state.reported.ended_round, driven.state.reported.ended_step) == (1, 9)
    local = driven.only(ReportLocal, driven.feed(stopped(2)))[-1].local
    assert (local.ended_round, local.ended_step) == (2, 5)


def test_round_without_steps_leaves_the_last_step_of_the_one_before() -> None:
    driven = running()
    told(driven, said(9))
    driven.feed(stopped())
    driven.feed(run(2))
    driven.feed(started(2))
    driven.feed(stopped(2))
    assert driven.state.ended_progress == (1, 9)


# -- location -----------------------------------------------------------------------


def test_other_user_can_write_below_progress_folder(tmp_path: Path) -> None:
    files = ProgressFiles(tmp_path, shared=True)
    files.prepare(3, slots=2)
    assert files.file(3, 1).parent.stat().st_mode & 0o777 == 0o777
    assert files.request_file(3).stat().st_mode & 0o777 == 0o644


def test_without_log_folder_progress_folder_is_removed_with_the_agent() -> None:
    files = ProgressFiles(None)
    assert files.read(1, 1) == {}
    for number in (1, 2):
        files.prepare(number, slots=1)
        files.file(number, 0).write_text('{"step": 4}')
    assert files.read(1, 1) == {}, "nobody reads an older round"
    assert files.read(2, 1)[0].step == 4
    made = files.file(2, 0).parents[2]
    assert made.is_dir()
    files.close()
    assert not made.exists()


def test_progress_of_earlier_run_is_removed(tmp_path: Path) -> None:
    files = ProgressFiles(tmp_path)
    files.prepare(1, slots=1)
    files.file(1, 0).write_text('{"step": 4}')
    files.prepare(1, slots=1)
    assert files.read(1, 1) == {}


def test_checkpoint_marker_file_without_progress(tmp_path: Path) -> None:
    files = ProgressFiles(tmp_path)
    files.prepare(1, slots=2)
    files.saved_file(1, 1).touch()
    assert files.read(1, 2).keys() == {1}
    first = files.read(1, 2)[1]
    assert (first.saves, first.checkpoint_step, first.step) == (True, -1, -1)
    files.saved_file(1, 1).write_text("120\n")
    os.utime(files.saved_file(1, 1), ns=(7, 7))
    files.file(1, 1).write_text('{"step": 125}')
    said = files.read(1, 2)[1]
    assert (said.saves, said.checkpoint_step, said.step, said.saved_ns) == (True, 120, 125, 7)
    files.saved_file(1, 1).write_text("what?")
    assert files.read(1, 2)[1].checkpoint_step == -1
    files.prepare(1, slots=2)
    assert files.read(1, 2) == {}, "what an earlier run said is not this one's"


def test_bundled_library_is_last_on_the_path(tmp_path: Path) -> None:
    assert library_beside(str(tmp_path / "launcher.pyz")) == ""
    library = tmp_path / LIBRARY
    (library / "elasticjob").mkdir(parents=True)
    assert library_beside(str(tmp_path / "launcher.pyz")) == str(library)
    assert worker_environment({"PYTHONPATH": "/mine"}, "/ours")["PYTHONPATH"] == "/mine:/ours"
    assert worker_environment({}, "/ours") == {"PYTHONPATH": "/ours"}
    assert worker_environment({}) == {}


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1e306, -1.0, 1e9])
def test_invalid_busy_time_is_no_measurement(wrong: float) -> None:
    """An infinite time once ended the agent: infinity cannot be converted to milliseconds."""
    driven = running()
    for step, busy in ((1, 0.5), (2, wrong)):
        word = WorkerProgress(step, UTC_MS, metrics={BUSY_METRIC: busy})
        driven.feed(WorkersProgressed(1, {0: word, 1: word}, UTC_MS), after=STEP_SECONDS)
    assert driven.state.reported_progress is not None
    assert (driven.state.reported_progress.step, driven.state.reported_progress.busy_ms) == (2, 500)
