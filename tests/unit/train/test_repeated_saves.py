"""Calls of `save` with one step: gradients that have grown since the first one are in no state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elasticjob.train import Link, Snapshots
from elasticjob.train.snapshots.core.agreement import Part, Version, part_at_stop
from elasticjob.train.snapshots.core.replicas import State
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers, ReplicaBuffers
from elasticjob.train.snapshots.memory.part_files import Body, read
from elasticjob.train.snapshots.memory.stop_copy import StopCopy
from elasticjob.train.snapshots.ranks.replication import Replication
from elasticjob.train.snapshots.state.held_state import Gradients
from elasticjob_launcher.processes import stop_copies
from tests.unit.train.test_overlap import Training, assert_same, copied, memory
from tests.unit.train.test_stop_copy import (
    ask,
    long_steps,
    restored,
    started,
    steps,
    within_a_step,
)
from tests.unit.train.waiting import PATIENCE_SECONDS, until

__all__ = ["long_steps", "memory"]


class Position:
    """Training with a position in its data, which each call of `save` has moved."""

    def __init__(self, **settings: Any) -> None:
        self.training = Training()
        self.snapshots = started(self.training, **settings)
        self.position = 0
        self.own: tuple[Any, ...] = ()

    @property
    def stop(self) -> StopCopy:
        assert self.snapshots._stop is not None
        return self.snapshots._stop

    def state(self) -> dict[str, Any]:
        return {**self.training.state(), "position": self.position}

    def save(self, step: int, *, store: bool | None = None) -> dict[str, Any]:
        self.position += 1
        self.stop._policy.most = 1e9
        own = [each(self.position) for each in self.own]
        self.snapshots.save(step, self.state, *own, store=store)
        self.stop._keep_at -= 1000.0
        found: dict[str, Any] = copied(self.state())
        return found

    def step(self, step: int) -> dict[str, Any]:
        self.training.backward()
        self.training.optimizer.step()
        return self.save(step)


def plain(training: Training) -> None:
    training.model(torch.randn(8, 200)).square().mean().backward()


def fresh(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=True)
    plain(training)


def in_place(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    plain(training)


def clipped(training: Training) -> None:
    plain(training)
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)


def of_one_parameter(training: Training) -> None:
    training.optimizer.zero_grad()
    training.model[2].bias.square().sum().backward()


def skipped_by_a_scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    scaler.scale(training.model(torch.randn(8, 200)).square().mean()).backward()
    training.model[2].weight.grad.fill_(torch.inf)
    scaler.step(training.optimizer)
    scaler.update()


def of_a_closure_that_fails(training: Training) -> None:
    def closure() -> float:
        plain(training)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        training.optimizer.step(closure)


@pytest.mark.parametrize(
    "backward",
    [
        plain,
        fresh,
        in_place,
        clipped,
        of_one_parameter,
        skipped_by_a_scaler,
        of_a_closure_that_fails,
    ],
)
def test_state_before_gradients_have_grown_stays(
    memory: Path, backward: Callable[[Training], None]
) -> None:
    worker = Position()
    worker.step(1)
    expected = worker.step(2)
    for _ in range(3):
        backward(worker.training)
        worker.save(2)
    assert ask(memory)
    assert restored().step == 2
    assert_same(expected, restored().state)
    expected = worker.step(3)
    assert ask(memory)
    assert_same(expected, restored().state)


def no_change(_: Training) -> None:
    pass


def zeroed(training: Training) -> None:
    training.optimizer.zero_grad(set_to_none=True)


def evaluated(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.randn(8, 200))


def stepped(training: Training) -> None:
    plain(training)
    training.optimizer.step()


def changed(training: Training) -> None:
    """A second optimizer that the script has not given."""
    plain(training)
    with torch.no_grad():
        training.model[2].weight.add_(1.0)


@pytest.mark.parametrize("work", [no_change, zeroed, evaluated, stepped])
def test_newer_state_replaces_one_without_gradients_since(
    memory: Path, work: Callable[[Training], None]
) -> None:
    """Such as with the schedule that an evaluation has changed."""
    worker = Position()
    worker.step(1)
    worker.save(1)
    worker.step(2)
    for _ in range(3):
        work(worker.training)
        expected = worker.save(2)
    assert ask(memory)
    assert restored().step == 2
    assert_same(expected, restored().state)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("work", [no_change, plain, stepped])
def test_state_and_own_state_are_of_the_same_call(
    memory: Path, count: int, work: Callable[[Training], None]
) -> None:
    worker = Position()
    worker.own = (lambda position: {"position": position},)
    worker.step(1)
    worker.save(1)
    worker.step(2)
    for _ in range(count):
        work(worker.training)
        worker.save(2)
    own = {part: path for part, path in MemoryBuffers(memory, 0).parts().items() if part.rank == 0}
    assert sorted(part.version.step for part in own) == [1, 2]
    assert ask(memory)
    found = restored()
    assert found.step == 2
    assert found.rank_state == {"position": found.state["position"]}
    assert found.state["position"] == (3 if work is plain else 3 + count)


def test_copies_of_an_own_state_on_other_nodes_are_of_the_last_call(tmp_path: Path) -> None:
    buffers = ReplicaBuffers(tmp_path)
    parts = {step: own_part(step) for step in (1, 2)}
    for step, text in ((1, b"first"), (2, b"first"), (2, b"other"), (2, b"third")):
        buffers.commit_step(parts[step], body_of(text))
    found = {
        part: bytes(read(path, part).views[0])
        for part, path in MemoryBuffers(tmp_path, 0).parts().items()
    }
    assert found == {parts[1]: b"first", parts[2]: b"third"}


def test_gradients_of_the_first_step_after_a_restore_are_in_no_state(memory: Path) -> None:
    worker = Position()
    worker.step(1)
    expected = worker.step(2)
    assert ask(memory)
    worker.snapshots.close()
    again = Position()
    for _ in range(2):
        plain(again.training)
        again.save(2)
        ask(memory)
        assert restored().step == 2
        assert_same(expected, restored().state)
    expected = again.step(3)
    assert ask(memory)
    assert_same(expected, restored().state)


def test_gradients_before_the_first_step_are_in_no_state(memory: Path) -> None:
    worker = Position()
    plain(worker.training)
    worker.save(0)
    ask(memory)
    assert Snapshots().restore() is None


def test_first_state_is_stored_while_gradients_grow(memory: Path, tmp_path: Path) -> None:
    worker = Position(storage=tmp_path / "storage")
    worker.own = (lambda position: {"position": position},)
    worker.step(1)
    expected = worker.step(2)
    plain(worker.training)
    worker.save(2, store=True)
    worker.snapshots.close()
    for path in memory.iterdir():
        path.unlink()
    found = Snapshots(tmp_path / "storage").restore()
    assert found is not None
    assert (found.step, found.place, found.rank_state) == (2, "storage", {"position": 2})
    assert_same(expected, found.state)


def test_regular_snapshot_stays_while_gradients_grow(memory: Path) -> None:
    worker = Position(every_steps=2)
    worker.own = (lambda position: {"position": position},)
    worker.step(1)
    expected = worker.step(2)
    for _ in range(3):
        plain(worker.training)
        worker.save(2)
    ask(memory)
    worker.snapshots.close()
    found = restored()
    assert (found.step, found.rank_state) == (2, {"position": 2})
    assert_same(expected, found.state)


@pytest.mark.parametrize(("work", "is_asked"), [(plain, False), (stepped, True)])
@pytest.mark.parametrize("has_storage", [True, False])
def test_planned_stop_waits_for_a_step_of_an_optimizer(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Training], None],
    is_asked: bool,
    has_storage: bool,
) -> None:
    """The gradients of a step that is not complete are in no snapshot."""
    worker = Position(storage=tmp_path / "storage" if has_storage else None)
    worker.snapshots._keeps = not has_storage
    asked: list[int] = []

    def stops(_: Link, *, in_memory: bool = False) -> bool:
        if in_memory is not has_storage:
            asked.append(worker.position)
        return False

    monkeypatch.setattr(Link, "stops_unasked", stops)
    worker.step(1)
    work(worker.training)
    worker.save(1)
    worker.step(2)
    assert asked == ([1, 2, 3] if is_asked else [1, 3])


def test_step_that_a_planned_stop_waits_for_ends_with_its_optimizer(
    memory: Path, long_steps: float
) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    asking = worker.asked(stop_copies.COPY_AFTER_STEP)
    until(lambda: stop._is_stopping)
    for _ in range(2):
        plain(worker.training)
        worker.snapshots.save(3, worker.training.state)  # returns at once
    assert stop._is_stopping
    worker.training.optimizer.zero_grad()
    worker.snapshots.save(3, worker.training.state)
    assert stop._is_stopping
    expected = steps(worker.training, worker.snapshots, 4, 4)
    asking.join(PATIENCE_SECONDS)
    assert restored().step == 4
    assert_same(expected, restored().state)


def test_duration_of_a_step_includes_all_of_its_calls(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Position()
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    for step in (1, 2, 3):
        worker.step(step)
        for _ in range(3):
            now[0] += 10.0
            plain(worker.training)
            worker.save(step)
        now[0] += 10.0
    assert list(worker.stop._steps) == [40.0, 40.0]


def test_gradients_since_the_ranks_have_agreed_to_hold_are_in_no_state(memory: Path) -> None:
    worker = Position(every_steps=2)
    worker.step(1)
    worker.stop.agreed(False)
    worker.step(2)  # a regular snapshot, at which they agree again
    assert worker.stop.is_on
    plain(worker.training)
    worker.save(2)
    assert worker.stop._held is None
    worker.step(3)
    assert worker.stop._held is not None


def test_copies_on_other_nodes_are_told_of_each_step(memory: Path) -> None:
    worker = Position()
    told: list[int] = []
    copies = SimpleNamespace(saves=told.append, state=State.IDLE)
    worker.snapshots._replication = cast("Replication", copies)
    for step in (1, 2, 2):
        worker.step(step)
    worker.snapshots._replication = None
    assert told == [1, 2, 2]


def test_steps_count_in_a_fork(memory: Path) -> None:
    """Such as a rank that is a fork of the process that has restored."""
    worker = Position()
    worker.step(1)
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            worker.stop.release()  # as the hook of an optimizer's step does
            os.write(writer, json.dumps(worker.stop.repeats(1)).encode())
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reader, 10) == b"false"
    assert worker.stop.repeats(1)


def test_first_repeated_step_is_found_by_a_few_gradients(memory: Path) -> None:
    """The marks of all would take time in each step of a script that repeats none."""
    worker = Position()
    worker.step(1)
    expected = worker.save(1)  # after an evaluation: the gradients are those of before
    assert ask(memory)
    assert_same(expected, restored().state)
    expected = worker.step(2)
    plain(worker.training)
    worker.save(2)
    assert ask(memory)
    assert_same(expected, restored().state)


def test_given_state_is_stored_without_new_gradients(memory: Path, tmp_path: Path) -> None:
    """Such as with the result of an evaluation."""
    worker = Position(storage=tmp_path / "storage")
    worker.step(1)
    expected = worker.save(1, store=True)
    worker.snapshots.close()
    for path in memory.iterdir():
        path.unlink()
    found = Snapshots(tmp_path / "storage").restore()
    assert found is not None
    assert_same(expected, found.state)


def test_state_that_something_else_has_changed_is_not_copied(memory: Path) -> None:
    """The other ranks copy the first one: one that replaced it would be of another call."""
    worker = Position()
    worker.step(1)
    worker.step(2)
    changed(worker.training)
    worker.save(2)
    ask(memory)
    assert Snapshots().restore() is None


def test_planned_stop_waits_also_once_the_ranks_hold_no_more(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Position(storage=tmp_path / "storage", every_steps=2)
    asked: list[int] = []

    def stops(_: Link, *, in_memory: bool = False) -> bool:
        if not in_memory:
            asked.append(worker.position)
        return False

    monkeypatch.setattr(Link, "stops_unasked", stops)
    monkeypatch.setattr(worker.stop._policy, "proposed", lambda *_, **__: False)
    worker.step(1)
    worker.step(2)
    assert not worker.stop.is_on
    plain(worker.training)
    worker.save(2)
    assert asked == [1, 2]


def test_gradients_are_found_by_identity_and_number_of_changes() -> None:
    values = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    values[0].grad = torch.ones(3)
    before = Gradients(values)
    assert not before.have_grown(values)
    assert not before.have_grown(values[1:])
    values[0].grad = None
    assert not before.have_grown(values)
    values[0].grad = torch.ones(3)
    assert before.have_grown(values)
    assert Gradients(()).have_grown(values)
    assert not Gradients(()).have_grown(values[1:])
    before = Gradients(values)
    values[0].grad.mul_(2.0)
    assert before.have_grown(values)


def own_part(step: int) -> Part:
    return part_at_stop(Version(step, 7), 10, 2)._replace(rank=1)


def body_of(text: bytes) -> Body:
    return Body(0, [memoryview(text)])
