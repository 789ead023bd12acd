"""Reason for which the last step was not copied at the stop, from the worker to its agent."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticjob import layout, train
from elasticjob.layout import Loss
from elasticjob.train import Snapshots
from elasticjob.train.snapshots import api as snapshots_module
from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Offer,
    Part,
    Plan,
    Source,
    Version,
    are_incomplete_at_stop,
    next_regular,
)
from elasticjob.train.snapshots.memory import stop_copy
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.reached_step import ReachedFile, ended_on
from elasticjob.train.snapshots.state import held_state
from tests.unit.train.test_overlap import Training, memory
from tests.unit.train.test_snapshot_job import Job, job
from tests.unit.train.test_stop_copy import ask, started, steps

__all__ = ["job", "memory"]


def recorded(memory: Path) -> Loss:
    """Return the reason in the record of the only worker."""
    [found] = ended_on(memory)
    return Loss(found.loss)


def trained(memory: Path, *own: Any, **settings: Any) -> tuple[Training, Snapshots]:
    training = Training()
    snapshots = started(training, **settings)
    steps(training, snapshots, 1, 3, *own)
    return training, snapshots


def test_worker_without_a_copy_has_ended_before_it(memory: Path) -> None:
    trained(memory)
    assert recorded(memory) is Loss.WORKERS_ENDED


def test_step_of_an_optimizer_is_the_reason_until_the_next_save(memory: Path) -> None:
    training, snapshots = trained(memory)
    training.optimizer.step()
    assert recorded(memory) is Loss.IN_STEP
    snapshots.save(4, training.state)
    assert recorded(memory) is Loss.WORKERS_ENDED


def test_first_save_after_a_restore_has_the_reason_of_later_ones(memory: Path) -> None:
    training, found = Training(), []
    snapshots = started(training)

    def state() -> dict[str, Any]:
        found.append(recorded(memory))
        return training.state()

    for step in (1, 2):
        training.optimizer.step()
        snapshots.save(step, state)
        assert recorded(memory) is Loss.WORKERS_ENDED
    assert found == [Loss.IN_STEP] * 2


def test_copied_step_has_no_reason(memory: Path) -> None:
    _alive = trained(memory)
    assert ask(memory)
    assert recorded(memory) is Loss.UNKNOWN


def test_reason_of_a_worker_that_ends_with_an_error_stays(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, snapshots = trained(memory)
    monkeypatch.setattr(stop_copy, "COPY_SECONDS", 0.0)
    monkeypatch.setattr(snapshots_module, "ended_with_error", lambda: True)
    stop = snapshots._stop
    assert stop is not None
    references = weakref.ref(snapshots._store), weakref.ref(stop), weakref.ref(snapshots)
    snapshots_module._finish(None, *references)
    assert recorded(memory) is Loss.COPY_TOO_LONG


def test_steps_without_save_are_the_reason(memory: Path) -> None:
    training, snapshots = trained(memory)
    for step in (5, 7):
        training.optimizer.step()
        training.optimizer.step()
        assert recorded(memory) is Loss.STEPS_SKIPPED
        snapshots.save(step, training.state)
        assert recorded(memory) is Loss.WORKERS_ENDED
    training.optimizer.step()
    assert recorded(memory) is Loss.STEPS_SKIPPED, "the next save is expected as late"


def test_each_of_two_optimizers_may_step_between_two_saves(memory: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([each], 0.1) for each in model.parameters()]
    snapshots = Snapshots(optimizers=optimizers, every_steps=1000, max_overhead=1.0)
    snapshots.restore()
    for step in (1, 2):
        for optimizer in optimizers:
            optimizer.step()
            assert recorded(memory) is Loss.IN_STEP if step > 1 else True
        snapshots.save(step, model.state_dict)


def large(training: Training) -> Callable[[], dict[str, Any]]:
    return lambda: {**training.state(), "other": torch.zeros(100)}


def refused(memory: Path, state: Any, *own: Any) -> Loss:
    training = Training()
    snapshots = started(training)
    training.optimizer.step()
    snapshots.save(1, state(training), *own)
    training.optimizer.step()
    return recorded(memory)


def test_state_that_cannot_be_held_is_the_reason(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = torch.eye(3).to_sparse()
    assert refused(memory, lambda each: {**each.state(), "x": sparse}) is Loss.UNSUPPORTED_STATE
    assert refused(memory, lambda _: {"step": 1}) is Loss.NO_TENSORS
    monkeypatch.setattr(held_state, "COPIED_BYTES", 100)
    assert refused(memory, large) is Loss.STATE_TOO_LARGE
    monkeypatch.setattr(stop_copy, "OWN_BYTES", 100)
    own = torch.zeros(200)
    assert refused(memory, lambda each: each.state(), own) is Loss.RANK_STATE_TOO_LARGE


def test_script_without_optimizers_is_the_reason(memory: Path) -> None:
    snapshots = Snapshots(every_steps=1000)
    snapshots.restore()
    snapshots.save(1, {"x": torch.zeros(1)})
    assert recorded(memory) is Loss.NO_OPTIMIZERS


def test_sharded_state_is_the_reason(memory: Path) -> None:
    training = Training()
    snapshots = started(training, sharded=True)
    snapshots.save(1, training.state)
    assert recorded(memory) is Loss.SHARDED


def test_cost_of_held_steps_is_the_reason(memory: Path) -> None:
    training, snapshots = trained(memory)
    stop = snapshots._stop
    assert stop is not None
    stop._policy.most = 0.0
    steps_left = 5  # the costs of five steps are measured first
    for step in range(4, 4 + steps_left):
        training.optimizer.step()
        snapshots.save(step, training.state)
    assert not stop.is_on
    assert recorded(memory) is Loss.COST


def test_parameters_on_a_device_and_lost_memory_are_reasons(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, snapshots = trained(memory)
    stop = snapshots._stop
    assert stop is not None
    monkeypatch.setattr(stop._optimizers, "all", [torch.optim.SGD([torch.ones(1, device="meta")])])
    obstacles = [stop.obstacle]
    stop._memory.buffers = None
    assert [*obstacles, stop.obstacle] == [Loss.ON_DEVICE, Loss.NO_MEMORY]
    assert not stop.wants()
    stop.agreed(False)
    assert recorded(memory) is Loss.NO_MEMORY


def test_refused_copies_are_reasons(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, snapshots = trained(memory)
    stop = snapshots._stop
    assert stop is not None
    with monkeypatch.context() as patch:
        patch.setattr(stop_copy, "COPY_SECONDS", 0.0)
        assert not stop.commit(10.0)
    assert recorded(memory) is Loss.COPY_TOO_LONG
    steps(training, snapshots, 4, 4)
    with torch.no_grad():
        next(training.model.parameters()).add_(1.0)
    assert not stop.commit(10.0)
    assert recorded(memory) is Loss.STATE_CHANGED
    steps(training, snapshots, 5, 5)

    def fail(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryBuffers, "commit_at_stop", fail)
    assert not stop.commit(10.0)
    assert recorded(memory) is Loss.WRITE_FAILED
    monkeypatch.setattr(MemoryBuffers, "commit_at_stop", lambda *_: False)
    for step, own, expected in ((6, (), Loss.COPY_LATE), (7, (1,), Loss.RANK_STATE_MISSING)):
        steps(training, snapshots, step, step, *own)
        assert not stop.commit(10.0)
        assert recorded(memory) is expected


def test_lost_steps_are_reported_with_their_reason(job: Job) -> None:
    job.settings(everySteps=3)
    snapshots = job.started()
    for step in range(1, 6):
        snapshots.save(step, {"x": step})
    job.restart()
    Snapshots().restore()
    assert (job.report().lost, job.report().loss) == (2, Loss.NO_OPTIMIZERS)
    train.progress(4)
    assert job.report().loss is Loss.NO_OPTIMIZERS


def test_reason_is_left_out_with_the_steps_that_a_newer_checkpoint_skips(job: Job) -> None:
    report = layout.SnapshotReport(restored=4, lost=4, lost_ms=400, loss=Loss.COST)
    train.link().snapshots(report)
    train.progress(7)
    assert (job.report().lost, job.report().loss) == (2, Loss.COST)
    job.restart()
    train.link().snapshots(report)
    train.progress(9)
    assert (job.report().lost, job.report().loss) == (0, Loss.UNKNOWN)


def test_step_that_no_rank_has_lost_has_no_reason(job: Job) -> None:
    job.settings(everySteps=1)
    job.started().save(1, {"x": 1})
    job.restart()
    Snapshots().restore()
    assert (job.report().lost, job.report().loss) == (0, Loss.UNKNOWN)


def test_report_of_an_earlier_library_has_no_reason(job: Job) -> None:
    report = layout.SnapshotReport(restored=4, lost=1, loss=Loss.COST)
    train.link().snapshots(report)
    content = job.progress.read_bytes()
    assert layout.unpack_report(content) == report
    assert layout.unpack_report(content[: layout.LOSS_START]) == report._replace(loss=Loss.UNKNOWN)
    later = content[: layout.LOSS_START] + layout.pack_loss(200)
    assert layout.unpack_report(later) == report._replace(loss=Loss.UNKNOWN)
    assert layout.unpack_answer(content) == layout.Answer()


def test_record_of_an_earlier_library_has_no_reason(tmp_path: Path) -> None:
    file = ReachedFile(tmp_path, 0)
    file.due = 2**70
    file.would_lose(Loss.COST)
    file.write(5)
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.due, found.loss) == (5, layout.MAX_STEP, Loss.COST)
    path = tmp_path / "reached-0"
    path.write_bytes(path.read_bytes()[:52])
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.due, found.loss) == (5, layout.NO_STEP, Loss.UNKNOWN)


def test_newer_part_of_a_stop_lacks_the_own_state_of_a_rank() -> None:
    regular = Part(Version(4, 1), SHARED, 2, 1)
    newer = Part(Version(6, 1), SHARED, 2, 3, at_stop=True)
    plan = Plan(Source("memory", regular, (0,)))
    assert are_incomplete_at_stop(plan, [Offer((regular, newer)), Offer()])
    assert not are_incomplete_at_stop(plan, [Offer((regular, newer._replace(rank=1)))])
    assert not are_incomplete_at_stop(plan, [Offer((regular, newer._replace(at_stop=False)))])


# --- the next regular snapshot


@pytest.mark.parametrize(
    ("step", "interval", "due", "expected"),
    [
        (40, 50, 60, 60),
        (40, 50, 41, 41),
        (40, 50, 40, 90),  # taken at this step
        (40, 50, -1, 90),
        (40, 50, 95, 90),  # of steps after the restored one
    ],
)
def test_stop_does_not_postpone_the_next_regular_snapshot(
    step: int, interval: int, due: int, expected: int
) -> None:
    assert next_regular(step, interval, due) == expected


def test_stops_within_an_interval_leave_storage_its_snapshots(memory: Path, tmp_path: Path) -> None:
    """Each round ends after four of ten steps, with a copy at the stop."""
    training, taken = Training(), []
    for last in range(4, 25, 4):
        snapshots = started(
            training, every_steps=10, storage=tmp_path / "storage", store_every=1, keep=9
        )
        for step in range(last - 3, last + 1):
            training.optimizer.step()
            if snapshots.save(step, training.state):
                taken.append(step)
        stop = snapshots._stop
        assert stop is not None
        stop._keep_at -= 1000.0
        assert ask(memory)
        snapshots.close()
        parts = [part for part in MemoryBuffers(memory, 0).parts() if part.rank == SHARED]
        at_stop = [part.version.step - part.before for part in parts if part.at_stop]
        assert set(at_stop) <= {10}, "the regular interval"
        assert at_stop or last % 10 == 0
    assert taken == [10, 20]
    folders = (tmp_path / "storage").glob("step-*")
    assert sorted(int(path.name[5:17]) for path in folders) == [10, 20]
