"""Copies of snapshots during the next step: what they hold, and what waits for them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticjob import layout
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.core.agreement import SHARED, Part, steps_within
from elasticjob.train.snapshots.core.interval import (
    AIM,
    COSTS,
    EARLY_GROWTH,
    GROWTH,
    PLAIN_STEPS,
    REPAYMENT,
    Cost,
    Interval,
)
from elasticjob.train.snapshots.memory import buffers, exclusive
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.snapshots.state import overlap
from elasticjob.train.snapshots.state.overlap import Optimizers, Overlap
from elasticjob.train.snapshots.storage.calls import StorageWriter
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder
from tests.unit.train.waiting import until

WIDTH = 200  # a weight of 160 KB: not copied at once


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(folder))
    return folder


class Statistics(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH * WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return values


class Training:
    """A model whose forward changes statistics, and whose optimizer changes the rest."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), Statistics(), torch.nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def trained() -> Training:
    """Return a training after its first step, with which the optimizer has a state."""
    training = Training()
    training.backward()
    training.optimizer.step()
    return training


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    else:
        assert first == second


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Let a copy wait for the event, and a little longer; yield it with the order of events."""
    release, events = threading.Event(), []
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        assert release.wait(60)
        time.sleep(0.3)  # for the event after it
        real(self, part, body)
        events.append("copied")

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    yield release, events
    release.set()


def test_copy_overlaps_forward_and_backward_and_ends_before_the_optimizers_step(
    memory: Path, slow: tuple[threading.Event, list[str]]
) -> None:
    release, events = slow
    training = trained()
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    expected = copied(training.state())
    snapshots.save(1, training.state(), torch.get_rng_state())
    training.backward()
    events.append("backward")
    release.set()
    training.optimizer.step()
    events.append("stepped")
    snapshots.close()
    assert events == ["backward", "copied", "copied", "stepped"]
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 1
    assert_same(expected, found.state)


@pytest.mark.parametrize("as_keyword", [True, False])
def test_copy_overlaps_the_closure_of_a_torch_optimizer(
    memory: Path, slow: tuple[threading.Event, list[str]], as_keyword: bool
) -> None:
    release, events = slow
    training = Training()
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    expected = copied(training.state())
    snapshots.save(1, training.state())

    def closure() -> float:
        training.backward()
        events.append("backward")
        release.set()
        return 0.5

    step: Any = training.optimizer.step
    assert (step(closure=closure) if as_keyword else step(closure)) == 0.5
    events.append("stepped")
    snapshots.close()
    assert events == ["backward", "copied", "stepped"]
    found = Snapshots().restore()
    assert found is not None
    assert_same(expected, found.state)


class ChangesBeforeClosure(torch.optim.SGD):
    """An optimizer such as SAM, which moves the parameters before forward and backward."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.zero_()
        return closure()


def test_copy_ends_before_the_closure_of_another_optimizer(memory: Path) -> None:
    training = Training()
    optimizer = ChangesBeforeClosure(training.model.parameters(), lr=0.1)
    snapshots = Snapshots(every_steps=1, optimizers=optimizer)
    snapshots.restore()
    expected = copied(training.model.state_dict())
    snapshots.save(1, training.model.state_dict())
    optimizer.step(training.backward)
    snapshots.close()
    found = Snapshots().restore()
    assert found is not None
    assert_same(expected, found.state)


def add_in_place(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.add_(1.0)


def add_to_data(training: Training) -> None:
    training.model[0].weight.data.add_(1.0)


def add_to_data_after_the_first_element(training: Training) -> None:
    training.model[0].weight.data.view(-1)[1:].add_(1.0)


def change_moments(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["exp_avg"].zero_()


@pytest.mark.parametrize(
    "change", [add_in_place, add_to_data, add_to_data_after_the_first_element, change_moments]
)
def test_copy_of_a_state_that_something_else_changes_leaves_the_last_snapshot(
    memory: Path,
    tmp_path: Path,
    slow: tuple[threading.Event, list[str]],
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Training], None],
) -> None:
    release, _ = slow
    training = trained()
    storage = tmp_path / "storage"
    snapshots = Snapshots(storage, every_steps=1, store_every=1, optimizers=training.optimizer)
    snapshots.restore()
    release.set()
    expected = copied(training.state())
    snapshots.save(1, training.state(), torch.get_rng_state())
    training.optimizer.step()
    release.clear()
    snapshots.save(2, training.state(), torch.get_rng_state())
    change(training)
    release.set()
    training.optimizer.step()
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 1
    assert_same(expected, found.state)
    assert "no snapshot of step 2: something other than the optimizers" in caplog.text
    expected = copied(training.state())
    snapshots.save(3, training.state(), torch.get_rng_state())
    change(training)
    snapshots.close()
    assert "step 3" not in caplog.text
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 3
    assert_same(expected, found.state)
    assert [int(path.name[5:17]) for path in sorted(storage.iterdir())] == [1, 3]


@pytest.mark.parametrize("place", ["memory", "storage", "storage alone"])
@pytest.mark.parametrize(
    ("interval", "due"), [({"store_every": 3}, 3), ({"store_seconds": 9999}, 1)]
)
def test_snapshot_for_storage_that_is_given_up_is_followed_by_another(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    interval: dict[str, Any],
    due: int,
) -> None:
    training = trained()
    owner: Any = MemoryBuffers if place == "memory" else StorageWriter
    name = "commit" if place == "memory" else "start"
    real = getattr(owner, name)
    if place == "storage alone":
        monkeypatch.delenv(layout.SNAPSHOT_FOLDER)
    in_memory = due - 1 if place == "memory" else due  # or nowhere: storage alone lacks the step

    def change_first(self: Any, first: Any, *others: Body) -> None:
        part = first if isinstance(first, Part) else first[0][0]
        if part.version.step == due:
            add_in_place(training)
        real(self, first, *others)

    monkeypatch.setattr(owner, name, change_first)
    storage = tmp_path / "storage"
    snapshots = Snapshots(storage, every_steps=1, optimizers=training.optimizer, **interval)
    snapshots.restore()
    for step in range(1, due + 3):
        snapshots.save(step, training.state(), {"step": step})
        training.optimizer.step()
        if step == due and place != "storage alone":
            found = Snapshots().restore()
            assert (0 if found is None else found.step) == in_memory
            assert found is None or found.rank_state == {"step": in_memory}
    snapshots.close()
    stored = StorageFolder(storage).scan().parts
    assert {(part.version.step, part.before) for part in stored} == {(due + 1, in_memory)}
    where = "" if place == "memory" else "in storage "
    assert f"no snapshot {where}of step {due}: something other than" in caplog.text


def test_copy_at_a_stop_that_does_not_end_costs_no_later_snapshot(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(buffers, "_LOCK_SECONDS", 0.0)
    training = trained()
    storage = tmp_path / "storage"
    snapshots = Snapshots(storage, every_steps=1, store_every=2, optimizers=training.optimizer)
    snapshots.restore()

    def train(*steps: int) -> tuple[int, Any]:
        for step in steps:
            snapshots.save(step, training.state(), {"step": step})
            training.optimizer.step()
            snapshots._store.end()
        found = Snapshots().restore()
        assert found is not None
        return found.step, found.rank_state

    assert train(1) == (1, {"step": 1})
    with MemoryBuffers(memory, 1)._locked(0.0):
        assert train(2, 3) == (1, {"step": 1})
    assert train(4) == (4, {"step": 4})
    snapshots.close()
    assert snapshots._overlap is not None
    assert snapshots._overlap.is_possible
    assert {int(path.name[5:17]) for path in storage.iterdir()} == {2, 4}
    assert caplog.text.count("in the memory of this node: ") == 1


class Crash(Exception):
    pass


def test_crash_after_a_given_up_snapshot_leaves_the_one_before_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own state of a rank may have been written with the snapshot that was given up."""
    training = trained()
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        if (part.version.step, part.rank) == (2, SHARED):
            add_in_place(training)
        if (part.version.step, part.rank) == (3, SHARED):
            raise Crash
        real(self, part, body)

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    for step in (1, 2):
        snapshots.save(step, training.state(), {"step": step})
        training.optimizer.step()
    with pytest.raises(Crash):
        snapshots.save(3, training.state(), {"step": 3})
    found = Snapshots().restore()
    assert found is not None
    assert (found.step, found.rank_state) == (1, {"step": 1})


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one that leaves out the initialization of torch's class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


def test_optimizer_without_hooks_is_refused(memory: Path) -> None:
    training = Training()
    wrapper = Wrapper(training.optimizer)
    with pytest.raises(TypeError, match=r"\.Wrapper: give the optimizer that it wraps"):
        Snapshots(optimizers=wrapper)
    snapshots = Snapshots(every_steps=1, optimizers=lambda: [wrapper])
    snapshots.restore()
    with pytest.raises(TypeError, match=r"\.Wrapper: give the optimizer that it wraps"):
        snapshots.save(1, training.state())
    Snapshots(optimizers=wrapper.inner).close()


def test_model_in_place_of_its_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be torch.optim.Optimizer objects .* got a .*Linear"):
        Snapshots(optimizers=torch.nn.Linear(1, 1))


def test_none_in_place_of_optimizers_is_none_of_them() -> None:
    assert not Optimizers(None)


class Observer:
    """Owner of a hook, with an entry for each of its calls: True if the call was compiled."""

    def __init__(self) -> None:
        self.compiled: list[bool] = []

    def before_step(self) -> None:
        self.compiled.append(torch.compiler.is_compiling())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch itself
def test_hook_of_a_compiled_step_is_not_compiled() -> None:
    training, observer = Training(), Observer()
    Optimizers(training.optimizer).before_steps(observer, Observer.before_step)
    step = torch.compile(lambda: training.optimizer.step(), backend="eager")
    for _ in range(3):
        training.backward()
        step()
    assert observer.compiled == [False] * 3


def test_optimizer_of_a_model_made_after_each_restore_waits_for_its_copies(
    memory: Path, slow: tuple[threading.Event, list[str]]
) -> None:
    release, events = slow
    made: list[Training] = []
    snapshots = Snapshots(every_steps=1, optimizers=lambda: made[-1].optimizer)
    for step in (1, 2):
        snapshots.restore()
        training = trained()
        made.append(training)
        expected = copied(training.state())
        events.clear()
        release.clear()
        snapshots.save(step, training.state())
        training.backward()
        events.append("backward")
        release.set()
        training.optimizer.step()
        events.append("stepped")
        assert events == ["backward", "copied", "stepped"]
    snapshots.close()
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 2
    assert_same(expected, found.state)


def test_next_snapshot_and_close_wait_for_the_last_copy(memory: Path) -> None:
    training = Training()
    snapshots = Snapshots(every_steps=1, optimizers=[training.optimizer])
    snapshots.restore()
    for step in (1, 2, 3):
        training.backward()
        training.optimizer.step()
        snapshots.save(step, training.state())
    snapshots.close()
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 3
    assert_same(copied(training.state()), found.state)


def test_stored_snapshot_is_complete_on_return(memory: Path, tmp_path: Path) -> None:
    training = Training()
    storage = tmp_path / "storage"
    snapshots = Snapshots(storage, every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    snapshots.save(1, training.state(), store=True)
    expected = copied(training.state())
    training.backward()
    training.optimizer.step()
    for path in memory.iterdir():
        path.unlink()
    found = Snapshots(storage).restore()
    assert found is not None
    assert_same(expected, found.state)


def test_error_of_a_copy_is_raised_in_the_training(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: MemoryBuffers, part: Part, body: Body) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(MemoryBuffers, "commit", fail)
    training = Training()
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    snapshots.save(1, training.state())
    training.backward()
    with pytest.raises(MemoryError, match="no memory"):
        training.optimizer.step()


def test_snapshots_whose_copy_failed_free_their_place_when_they_close(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: MemoryBuffers, part: Part, body: Body) -> None:
        raise MemoryError("no memory")

    training = Training()
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBuffers, "commit", fail)
        snapshots.save(1, training.state())
        with pytest.raises(MemoryError, match="no memory"):
            snapshots.close()
    other = Snapshots(every_steps=1)
    other.restore()
    assert other.save(1, training.state())


def test_copy_is_awaited_after_an_interrupted_wait(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal that ends the training may raise; the script then saves once more."""
    release, copied = threading.Event(), []
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        assert release.wait(60)
        real(self, part, body)
        copied.append(part)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    training = Training()
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    training.optimizer.register_step_pre_hook(lambda *_: sender.start())
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        snapshots.save(1, training.state())
        training.backward()
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, former)
    assert not copied
    timer = threading.Timer(0.2, release.set)
    timer.start()
    snapshots.close()
    assert len(copied) == 1
    timer.join()


def test_place_stays_taken_until_the_last_copy_before_a_restore_is_complete(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, taken = threading.Event(), []
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        assert release.wait(60)
        real(self, part, body)
        taken.append(str(memory) in exclusive._writers)

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    training = Training()
    snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
    snapshots.restore()
    snapshots.save(1, training.state())
    timer = threading.Timer(0.2, release.set)
    timer.start()
    assert snapshots.restore() is not None
    assert taken == [True]
    timer.join()


def test_snapshots_leave_neither_hook_nor_thread_behind(memory: Path) -> None:
    training = Training()
    for step in (1, 2):
        snapshots = Snapshots(every_steps=1, optimizers=training.optimizer)
        snapshots.restore()
        snapshots.save(step, training.state())
        snapshots.close()
        assert len(training.optimizer._optimizer_step_pre_hooks) == 2
        copying = [each for each in threading.enumerate() if "-copy" in each.name]
        del snapshots
        gc.collect()
        # The thread of the copy keeps the last one a moment longer than its result.
        until(lambda: not training.optimizer._optimizer_step_pre_hooks)
        for thread in copying:
            thread.join(60)
            assert not thread.is_alive()


FORK_DURING_A_COPY = """
import os, signal, sys, threading, torch
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers

real, release = MemoryBuffers.commit, threading.Event()

def commit(self, part, body):
    release.wait()
    real(self, part, body)

MemoryBuffers.commit = commit
model = torch.nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
snapshots = Snapshots(sys.argv[1], every_steps=1, optimizers=optimizer)
snapshots.restore()
snapshots.save(1, {"model": model.state_dict()})
child = os.fork()
if not child:
    signal.alarm(60)  # ends a child that waits for the thread of this process
    optimizer.step()
    release.set()
    snapshots._overlap.start(lambda: None)
    snapshots._overlap.wait()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
release.set()
snapshots.close()
"""


def test_fork_waits_for_no_copy_of_its_parent(memory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK_DURING_A_COPY, str(tmp_path / "storage")]
    subprocess.run(command, check=True, timeout=200)
    found = Snapshots().restore()
    assert found is not None
    assert found.step == 1


FORKED_TRAINING = """
import multiprocessing, sys, time, torch
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers

real = MemoryBuffers.commit

def commit(self, part, body):
    time.sleep(1)
    real(self, part, body)

def train():
    MemoryBuffers.commit = commit
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    snapshots = Snapshots(sys.argv[1], every_steps=1, store_every=1, optimizers=optimizer)
    snapshots.restore()
    snapshots.save(1, {"model": model.state_dict()})

child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
sys.exit(child.exitcode)
"""


def test_process_of_multiprocessing_ends_after_its_last_copy_is_in_storage(
    memory: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    command = [sys.executable, "-W", "ignore", "-c", FORKED_TRAINING, str(storage)]
    subprocess.run(command, check=True, timeout=200)
    for path in memory.iterdir():
        path.unlink()
    found = Snapshots(storage).restore()
    assert found is not None
    assert (found.step, found.place) == (1, "storage")


class Device:
    """Order of the operations on a device with streams, in place of `torch.cuda`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._names = iter(("copies",))
        self.compute = _Stream(self, "compute")

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream(self, next(self._names))

    def Event(self) -> _Event:
        return _Event(self)

    def current_stream(self, device: torch.device) -> _Stream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        yield


class _Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: _Stream) -> None:
        self.device.events.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self.device.events.append(f"{self.name} waits for the copy")


class _Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: _Stream) -> None:
        self.device.events.append(f"recorded on {stream.name}")

    def synchronize(self) -> None:
        self.device.events.append("host waits for the copy")


@pytest.mark.parametrize("is_source", [True, False])
def test_optimizers_step_waits_for_copies_from_a_device_on_the_device_alone(
    monkeypatch: pytest.MonkeyPatch, is_source: bool
) -> None:
    device = Device()
    monkeypatch.setattr(overlap, "_cuda", lambda: device)
    monkeypatch.setattr(overlap, "_pinned_like", torch.empty_like)
    monkeypatch.setattr(
        overlap,
        "_copy",
        lambda source, target, stream: device.events.append(f"copy on {stream.name}"),
    )
    training = Training()
    copies = Overlap(Optimizers(training.optimizer))
    copies.begin()
    weight = training.model[0].weight
    first = copies._from_device(weight, is_source)
    copies.start(lambda: device.events.append("written"))
    copies.wait()
    before = ["compute waits for the copy"] * (not is_source)
    assert device.events == [
        *("copies waits for compute", "copy on copies", "recorded on copies", *before),
        *("host waits for the copy", "written"),
    ]
    device.events.clear()
    training.backward()
    training.optimizer.step()
    assert device.events == ["compute waits for the copy"]
    copies.begin()
    assert copies._from_device(weight, is_source) is first  # pinned memory is used again


def test_views_of_the_same_memory_of_a_device_are_copied_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap, "_cuda", Device)
    monkeypatch.setattr(overlap, "_pinned_like", torch.empty_like)
    monkeypatch.setattr(overlap, "_copy", lambda source, target, stream: target.copy_(source))
    copies = Overlap(Optimizers(()))
    copies.begin()
    whole = torch.arange(16.0).reshape(4, 4)
    number = torch.tensor([1 + 2j])
    views = [whole, whole.t(), whole[:2, :2], whole[::2, :2], number, number.conj()]
    for view in views:
        assert torch.equal(copies._from_device(view, False), view)


def test_interval_keeps_the_overhead_below_its_share() -> None:
    interval = Interval(None, None, 0.01)
    interval.start(10, 0.0)
    now, step = 0.0, 10
    proposals = []
    for cost in (None, 0.9, 0.02, 0.02, 0.02, 0.02):
        step, now = step + 1, now + 0.1 + (cost or 0.0)
        proposals.append(interval.proposed(step, now, None if cost is None else Cost(cost, cost)))
    # The first snapshots measure; a cost of 0.02 s is 0.85 % of 24 steps of 0.1 s.
    # The median of the first two is longer than the time since the last snapshot.
    # The first snapshot took far more than its share.
    assert proposals == [1, EARLY_GROWTH, 1, EARLY_GROWTH, EARLY_GROWTH, 36]
    taken = Cost(0.02, 0.02)
    assert interval.proposed(step + 2000, now + 2000 * 0.1 + 0.02, taken) == 24
    assert interval.proposed(step + 2020, now + 2000 * 0.1 + 20 * 0.05 + 0.04, taken) > 24


@pytest.mark.parametrize("beside", [False, True])
def test_interval_is_longer_until_expensive_first_snapshots_are_repaid(beside: bool) -> None:
    """The first two take 3 and 2 s, the others 0.35 s, alone or beside a step of 1.1 s."""
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    costs = itertools.chain([3.0, 2.0], itertools.repeat(0.35))
    step, now, total = 0, 0.0, 0.0
    taken: list[int] = []
    due, cost, slowed = interval.first, None, 0.0
    while now < 3000.0:
        step, now = step + 1, now + 1.1 + slowed
        if taken:
            interval.stepped(1, 1.1 + slowed, copied=taken[-1] == step - 1)
        slowed = 0.0
        if step == due:
            due = step + interval.proposed(step, now, cost)
            taken.append(step)
            seconds = next(costs)
            stopped, slowed = (0.0, seconds) if beside else (seconds, 0.0)
            cost = Cost(stopped, stopped, slowed)
            now, total = now + stopped, total + seconds
    gaps = [after - before for before, after in itertools.pairwise(taken)]
    usual = steps_within(0.01 * AIM, 0.35, 1.1)
    assert max(gaps[COSTS + 1 :]) <= REPAYMENT * usual
    assert gaps[-1] == usual
    assert total < 0.0095 * now


@pytest.mark.parametrize(
    ("is_held", "expected"),
    [(False, [1, 2, 6, 22, 81, 140]), (True, [1, 5, 64, 123, 182, 241])],
)
def test_interval_of_an_expensive_snapshot_grows_while_the_costs_are_measured(
    is_held: bool, expected: list[int]
) -> None:
    """Or else each of the first steps would take such a snapshot.

    If the steps are held for a copy at a stop, the first measured cost sets the interval.
    """
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    step, now, taken = 0, 0.0, []
    next_step = interval.first
    while step < 500:
        step, now = step + 1, now + 1.0
        if step == next_step:
            taken.append(step)
            now += 0.5  # 0.85 % of 59 steps
            cost = Cost(0.5, 0.5) if len(taken) > 1 else None
            next_step = step + interval.proposed(step, now, cost, is_held=is_held)
    assert taken[: COSTS + 1] == expected


def test_interval_of_expensive_steps_is_one() -> None:
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    assert [interval.proposed(step, step * 10.0, Cost(0.05, 0.05)) for step in range(1, 9)] == [
        1
    ] * 8


def proposals(
    interval: Interval, cost: Cost, slowed: float, snapshots: int = 3 * COSTS
) -> list[int]:
    """Return the proposed numbers of steps of 0.1 s, of which those after a snapshot take more."""
    interval.start(0, 0.0)
    step, now, found = 0, 0.0, []
    for number in range(snapshots):
        found.append(interval.proposed(step, now, cost if number else None))
        now += cost.stopped
        for number in range(found[-1]):
            seconds = 0.1 + (slowed if number == 0 else 0.0)
            interval.stepped(1, seconds, copied=number == 0)
            step, now = step + 1, now + seconds
    return found


@pytest.mark.parametrize(
    ("cost", "slowed", "interval"),
    [
        (Cost(0.001, 0.001, 0.02), 0.0, 1),  # another processor copies
        (Cost(0.001, 0.001, 0.02), 0.01, 13),
        (Cost(0.001, 0.001, 0.02), 0.05, 24),  # at most the processor time of the copy
        (Cost(0.01, 0.002, 0.02), 0.0, 12),  # the optimizer's step waited for the copy
        (Cost(0.01, 0.01), 0.03, 12),  # complete on return
    ],
)
def test_interval_counts_by_how_much_a_copy_slows_the_next_step(
    cost: Cost, slowed: float, interval: int
) -> None:
    found = proposals(Interval(None, None, 0.01), cost, slowed)
    most = (cost.stopped + cost.background) / (0.001 * AIM)
    assert found[0] == 1
    assert max(found[:COSTS]) <= most + 2
    assert 0.6 * most <= max(found) <= 1.5 * most + 1  # before a step without a copy was measured
    assert interval - 1 <= found[-1] <= interval + 1


def test_step_without_a_copy_is_measured_anew_after_many_snapshots() -> None:
    found = proposals(Interval(None, None, 0.01), Cost(0.0001, 0.0001, 0.02), 0.0, 80)
    assert set(found[-30:]) == {1, 2}


def test_calls_some_steps_apart_measure_a_step_without_a_copy_anew() -> None:
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    cost, found = Cost(0.001, 0.001, 0.02), []
    for number in range(COSTS + PLAIN_STEPS + 1):  # a snapshot at each call
        if number:
            interval.stepped(10, 10.0, copied=True)
        found.append(interval.proposed(10 * number, 10.0 * number, cost if number else None))
    assert found == [1] + [3] * PLAIN_STEPS + [11] * COSTS
    interval.stepped(10, 10.0, copied=True)
    interval.stepped(10, 10.0, copied=False)
    assert interval.proposed(10 * number + 20, 10.0 * number + 20, cost) == 3


def test_snapshot_follows_each_expensive_step_of_a_device() -> None:
    """The host does not wait for the steps, so their times with and without a copy are unknown."""
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    cost = Cost(0.001, 0.001, 0.001)
    assert {interval.proposed(step, 1.0 * step, cost) for step in range(1, 5 * PLAIN_STEPS)} == {1}


def test_single_fast_step_makes_no_endless_interval() -> None:
    interval = Interval(None, None, 0.01)
    interval.start(0, 0.0)
    step, now, cost = 0, 0.0, Cost(0.02, 0.02)
    for number in range(COSTS + 1):
        step, now = step + 1, now + 0.02 + (1e-9 if number == COSTS else 0.1)
        found = interval.proposed(step, now, cost if number else None)
    assert found == int(REPAYMENT * GROWTH)
    assert interval.proposed(step + found, now + 0.02 + found * 0.1, cost) in (24, 25)


def test_first_snapshot_after_a_checkpoint_of_another_kind_sets_no_interval(memory: Path) -> None:
    first = Snapshots()
    assert first.restore() is None
    assert first.save(50001, {"x": 1})
    first.close()
    second = Snapshots()
    assert second.restore() is not None
    assert second.save(50002, {"x": 2})


def test_interval_of_the_restored_snapshot_applies_until_new_costs_are_measured() -> None:
    interval = Interval(None, None, 0.01)
    interval.start(50, 0.0, 20)
    assert interval.first == 20
    cost, now, step, found = Cost(0.02, 0.02), 0.0, 50, []
    for number in range(COSTS + 2):
        step, now = step + 20, now + 20 * 0.2 + 0.02
        found.append(interval.proposed(step, now, None if number == 0 else cost))
    assert found == [20] * COSTS + [12, 12]


def test_given_intervals_are_not_taken_from_the_restored_snapshot() -> None:
    steps, seconds = Interval(7, None, 0.01), Interval(None, 5.0, 0.01)
    steps.start(50, 0.0, 20)
    seconds.start(50, 0.0, 20)
    assert (steps.first, seconds.first) == (7, 1)


def test_snapshots_without_an_interval_become_rarer_than_the_steps(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        real(self, part, body)
        now[0] += 0.0195  # 0.85 % of 23 steps

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    snapshots = Snapshots()
    snapshots.restore()
    taken = []
    for clock in ("monotonic", "perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    for step in range(1, 100):
        now[0] += 0.1
        if snapshots.save(step, {"x": torch.ones(1000)}):
            taken.append(step)
    assert taken == [1, 2, 6, 22, 45, 68]  # at first up to four times as many steps later
