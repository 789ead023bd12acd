"""Copy of the state of the last step at a stop: values, waits, limits, crashes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from elasticjob.train import Link, SnapshotError, Snapshots
from elasticjob.train.snapshots.api import _finish
from elasticjob.train.snapshots.core import interval
from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Missing,
    Offer,
    Part,
    Version,
    buffer_at_stop,
    decide,
    interval_before,
    part_at_stop,
)
from elasticjob.train.snapshots.core.exchange import (
    Call,
    Exchange,
    Header,
    check_calls,
    unpack_proposals,
)
from elasticjob.train.snapshots.core.interval import HoldPolicy
from elasticjob.train.snapshots.job import ended_with_error
from elasticjob.train.snapshots.memory import buffers, part_files, stop_copy
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.copy_requests import ANSWER, MAGIC, SOCKET
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.snapshots.memory.stop_copy import StopCopy
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.state import held_state
from elasticjob_launcher.processes import stop_copies
from tests.unit.train.test_overlap import Training, assert_same, copied, memory
from tests.unit.train.waiting import PATIENCE_SECONDS, until

__all__ = ["memory"]

EVERY = 1000


def ask(
    folder: Path, local_rank: int = 0, kind: int = stop_copies.AT_ONCE, seconds: float = 10.0
) -> float:
    """Ask a worker as the launcher does; return the limit in seconds once it has copied."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_SECONDS)
        descriptor = os.open(folder, os.O_PATH)
        link.connect(f"/proc/self/fd/{descriptor}/{SOCKET}{local_rank}")
        os.close(descriptor)
        request = stop_copies.REQUEST.pack(stop_copies.MAGIC, kind, int(seconds * 1000))
        # A worker that waits no longer for it copies at once, and may have ended.
        with contextlib.suppress(*[BrokenPipeError] * (kind == stop_copies.AT_ONCE)):
            link.sendall(request)
        answer = link.recv(100)
        if not answer:
            return 0.0
        magic, milliseconds = ANSWER.unpack(answer)
        assert magic == MAGIC
        assert link.recv(100) == b""
        return float(milliseconds) / 1000


def asked(*arguments: Any) -> threading.Thread:
    """Ask with these arguments in a thread; return that."""
    asking = threading.Thread(target=ask, args=arguments)
    asking.start()
    return asking


def restored() -> Any:
    found = Snapshots().restore()
    assert found is not None
    return found


def started(training: Training, **settings: Any) -> Snapshots:
    snapshots = Snapshots(
        optimizers=training.optimizer, **{"every_steps": EVERY, "max_overhead": 1.0, **settings}
    )
    snapshots.restore()
    return snapshots


def steps(
    training: Training, snapshots: Snapshots, first: int, last: int, *own: Any
) -> dict[str, Any]:
    """Train and save these steps; return the state of the last one.

    A copy at a stop is then worth it: no real duration of a copy, a step or a hold decides.
    """
    stop = snapshots._stop
    assert stop is not None
    stop._policy.most = math.inf
    for step in range(first, last + 1):
        training.backward()
        training.optimizer.step()
        snapshots.save(step, training.state, *own)
    stop._keep_at -= 1000.0
    found: dict[str, Any] = copied(training.state())
    return found


def test_stop_copies_the_state_of_the_last_step(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 3)
    training.backward()  # changes the statistics
    assert 0 < ask(memory) <= stop_copy.COPY_SECONDS
    found = restored()
    assert (found.step, found.place, found.lost_steps) == (3, "memory", 0)
    assert_same(expected, found.state)
    training.optimizer.step()  # goes on, as if nobody had asked
    expected = steps(training, snapshots, 5, 6)
    assert ask(memory)
    assert restored().step == 6
    assert_same(expected, restored().state)


def test_memory_that_was_full_at_the_restore_has_copies_at_stops_once_it_has_room(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, storage = Training(), tmp_path / "storage"
    first = started(training, storage=storage)
    steps(training, first, 1, 1)
    first.save(1, training.state, store=True)
    first.close()
    for path in memory.iterdir():
        path.unlink()
    real, full = os.posix_fallocate, [True]

    def allocated(fd: int, offset: int, size: int) -> None:
        if full[0] and Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(memory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    snapshots = started(training, storage=storage, every_steps=2)
    assert snapshots._memory.buffers is None
    steps(training, snapshots, 2, 3)
    assert snapshots._stop is not None
    assert not snapshots._stop._rates, "nothing was written"
    full[0] = False
    expected = steps(training, snapshots, 4, 11)
    assert ask(memory)
    assert restored().step == 11
    assert_same(expected, restored().state)


def test_stop_within_the_closure_of_an_optimizer_copies_the_step_before(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 3)

    def closure() -> float:
        training.backward()
        assert ask(memory)
        return 0.0

    training.optimizer.step(closure)
    assert restored().step == 3
    assert_same(expected, restored().state)


def test_nothing_is_written_without_a_stop(memory: Path) -> None:
    training = Training()
    steps(training, started(training), 1, 3)
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_containers_and_small_values_are_those_of_the_step(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    inner: dict[str, Any] = {"list": [1, (2, "x")], "bytes": bytearray(b"ab"), "set": {1}}
    state = OrderedDict(model=training.model.state_dict(), inner=inner, rng=torch.get_rng_state())
    expected = copied(state)
    expected["inner"] = {"list": [1, (2, "x")], "bytes": bytearray(b"ab"), "set": {1}}
    snapshots.save(1, state)
    time.sleep(0.05)
    inner["list"].append(3)
    inner["bytes"].extend(b"c")
    inner["set"].add(2)
    inner["new"] = 1
    state["rng"].zero_()
    state["late"] = None
    assert ask(memory)
    found = restored().state
    assert type(found) is OrderedDict
    assert_same(expected, found)
    assert found["inner"] == expected["inner"]
    assert found["model"]._metadata == training.model.state_dict()._metadata


def slow_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[str], threading.Event, threading.Event]:
    """Let a copy wait half a second for the last event; return its record and both events."""
    events: list[str] = []
    begins, ends = threading.Event(), threading.Event()
    real = MemoryBuffers.commit_at_stop

    def commit(*arguments: Any) -> bool:
        begins.set()
        ends.wait(0.5)
        done = real(*arguments)
        events.append("copied")
        return done

    monkeypatch.setattr(MemoryBuffers, "commit_at_stop", commit)
    return events, begins, ends


def test_step_of_an_optimizer_waits_for_the_copy(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 2)
    events, begins, ends = slow_copies(monkeypatch)
    training.backward()
    asking = asked(memory)
    assert begins.wait(PATIENCE_SECONDS)
    training.optimizer.step()
    events.append("stepped")
    ends.set()
    asking.join()
    assert events == ["copied", "stepped"]
    assert_same(expected, restored().state)


def test_stop_during_the_step_of_an_optimizer_waits_for_its_state(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks may be in that step once the launcher asks."""
    monkeypatch.setattr(StopCopy, "_limit_seconds", lambda _: PATIENCE_SECONDS)
    monkeypatch.setattr(StopCopy, "_patience", lambda _: PATIENCE_SECONDS)
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 2)
    assert snapshots._stop is not None
    snapshots._stop.release()  # as the hook of the optimizer's step does
    asking = asked(memory)
    time.sleep(0.3)
    assert asking.is_alive()
    expected = steps(training, snapshots, 3, 3)
    asking.join()
    assert restored().step == 3
    assert_same(expected, restored().state)


def within_a_step(memory: Path, since: float = 0.5, usual: float = 2.0) -> Planned:
    """Train three steps; return a worker whose fourth step, of `usual` seconds, began before."""
    training = Training()
    snapshots = started(training)
    state = steps(training, snapshots, 1, 3)
    stop = snapshots._stop
    assert stop is not None
    stop._steps.clear()
    stop._steps.append(usual)
    stop._last = (3, time.perf_counter() - since)
    return Planned(memory, training, snapshots, state)


class Planned(NamedTuple):
    """Worker within a step, whose launcher asks it to end that."""

    memory: Path
    training: Training
    snapshots: Snapshots
    state: dict[str, Any]

    def asked(self, kind: int, seconds: float = 1000.0) -> threading.Thread:
        return asked(self.memory, 0, kind, seconds)


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the duration of steps that last longer than any wait of a test."""
    monkeypatch.setattr(stop_copy, "COPY_SECONDS", 500.0)
    return 4 * PATIENCE_SECONDS


def test_planned_stop_copies_the_state_at_the_end_of_the_step(
    memory: Path, long_steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    events, begins, ends = slow_copies(monkeypatch)
    stop = worker.snapshots._stop
    assert stop is not None
    asking = worker.asked(stop_copies.COPY_AFTER_STEP)
    until(lambda: stop._is_stopping)
    assert not begins.is_set()
    expected = steps(worker.training, worker.snapshots, 4, 4)  # returns once that is copied
    assert events == ["copied"]
    ends.set()
    asking.join()
    assert (restored().step, restored().lost_steps) == (4, 0)
    assert_same(expected, restored().state)
    steps(worker.training, worker.snapshots, 5, 5)  # not stopped, it goes on


def test_leaving_node_ends_its_step_and_copies_nothing(memory: Path, long_steps: float) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    asking = worker.asked(stop_copies.END_STEP)
    until(lambda: stop._is_stopping)
    assert asking.is_alive()
    steps(worker.training, worker.snapshots, 4, 4)
    asking.join()
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_leaving_node_within_the_step_of_an_optimizer_sends_its_own_state(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that remain wait for that step, too, and copy its shared state."""
    events: list[object] = []
    waits = threading.Event()

    def patience(_: StopCopy) -> float:
        waits.set()
        return PATIENCE_SECONDS

    monkeypatch.setattr(StopCopy, "_patience", patience)
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3, "own")
    stop = snapshots._stop
    assert stop is not None
    stop.replication = SimpleNamespace(  # type: ignore[assignment]
        send_step=lambda part, _: events.append(part.version.step),
        flush_steps=lambda _: events.append("flushed"),
        saves=lambda _: None,
    )
    training.optimizer.step()
    asking = asked(memory, 0, stop_copies.END_STEP)
    until(lambda: waits.is_set() or bool(events))
    snapshots.save(4, training.state, "own")
    asking.join()
    assert events == [4, "flushed"]
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_leaving_node_waits_for_no_state_that_its_ended_step_cannot_hold(
    memory: Path, long_steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    events: list[object] = []

    def patience() -> float:
        events.append("waits")
        return 0.0

    monkeypatch.setattr(stop, "_patience", patience)
    stop.replication = SimpleNamespace(  # type: ignore[assignment]
        flush_steps=lambda _: events.append("flushed"), saves=lambda _: None
    )
    asking = worker.asked(stop_copies.END_STEP)
    until(lambda: stop._is_stopping)
    worker.training.optimizer.step()
    worker.snapshots.save(4, {"x": torch.eye(3).to_sparse()})
    asking.join()
    assert events == ["flushed"]


@pytest.mark.parametrize(
    ("since", "usual", "seconds"),
    [
        (0.2, 1.0, 1000.0),  # the step has just begun
        (0.1, 0.15, 1000.0),  # a short step
        (200.0, 100.0, 1000.0),  # it takes longer than usual, and may hang
        (50.0, 100.0, 60.0),  # the copy would not be complete in time
    ],
)
@pytest.mark.parametrize("kind", [stop_copies.COPY_AFTER_STEP, stop_copies.END_STEP])
def test_planned_stop_does_not_wait_for(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    since: float,
    usual: float,
    seconds: float,
    kind: int,
) -> None:
    now = time.perf_counter()
    worker = within_a_step(memory, 0.0, usual)
    stop = worker.snapshots._stop
    assert stop is not None
    stop._last = (3, now)
    monkeypatch.setattr(time, "perf_counter", lambda: now + since)
    waits: list[float] = []
    flushes: list[float] = []
    monkeypatch.setattr(stop, "_finish_step", waits.append)
    monkeypatch.setattr(stop, "replication", SimpleNamespace(flush_steps=flushes.append))
    ask(memory, kind=kind, seconds=seconds)
    assert waits == []
    assert flushes == [stop_copy.FLUSH_SECONDS]  # the node may leave
    found = Snapshots().restore()
    assert (found is None) == (kind == stop_copies.END_STEP)
    assert found is None or found.step == 3


@pytest.mark.parametrize("kind", [stop_copies.COPY_AFTER_STEP, stop_copies.END_STEP])
def test_worker_past_a_requested_save_ends_no_step(
    memory: Path, long_steps: float, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """It waits for the stop and makes no further step."""
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    assert stop._left_of_step(1000.0)
    monkeypatch.setattr(Link, "awaits_stop", True)
    ask(memory, kind=kind, seconds=1000.0)
    found = Snapshots().restore()
    assert (found is None) == (kind == stop_copies.END_STEP)


@pytest.mark.parametrize("ends", ["agreed", "close"])
def test_wait_for_a_step_ends_once_the_ranks_hold_no_more(
    memory: Path, long_steps: float, ends: str
) -> None:
    """No `save` holds the state of the step then."""
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    finished: list[bool] = []
    waiting = threading.Thread(target=lambda: finished.append(stop._finish_step(long_steps)))
    waiting.start()
    until(lambda: stop._is_stopping)
    if ends == "close":
        stop.close()
    else:
        stop.agreed(False)
    waiting.join(PATIENCE_SECONDS)
    assert finished == [False]


def test_step_counts_as_ended_only_after_its_save(memory: Path, long_steps: float) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    assert not stop._finish_step(0.0)
    finished: list[bool] = []
    waiting = threading.Thread(target=lambda: finished.append(stop._finish_step(long_steps)))
    waiting.start()
    until(lambda: stop._is_stopping)
    stop._is_stopping = False  # the step is not waited for here
    steps(worker.training, worker.snapshots, 4, 4)
    waiting.join(PATIENCE_SECONDS)
    assert finished == [True]


def test_step_whose_state_cannot_be_held_ends_the_wait(
    memory: Path, long_steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    stop = worker.snapshots._stop
    assert stop is not None
    asking = worker.asked(stop_copies.COPY_AFTER_STEP)
    until(lambda: stop._is_stopping)
    monkeypatch.setattr(held_state, "COPIED_BYTES", 0)
    steps(worker.training, worker.snapshots, 4, 4)
    asking.join(PATIENCE_SECONDS)
    assert not asking.is_alive()
    assert Snapshots().restore() is None


def test_end_of_the_step_is_waited_for_before_the_speed_of_a_copy_is_known(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assumed speed is slow enough: 800 MB and a step of a second fit into five seconds."""
    worker = within_a_step(memory, 0.0, 1.0)
    stop = worker.snapshots._stop
    assert stop is not None
    stop._size = 800_000_000
    stop._last = (3, 1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.5)
    assert stop._left_of_step(5.0) == pytest.approx(1.0)
    stop._rates.append(400e6)  # measured: three times that is left for it
    assert stop._left_of_step(5.0) == 0.0


def test_step_that_does_not_end_is_given_up(memory: Path) -> None:
    """A rank before its `save` waits for one that was asked after that, and was killed."""
    worker = within_a_step(memory, 0.2, 0.4)
    ask(memory, kind=stop_copies.COPY_AFTER_STEP)
    assert restored().step == 3
    assert_same(worker.state, restored().state)


def test_failure_does_not_wait_for_the_end_of_the_step(memory: Path, long_steps: float) -> None:
    worker = within_a_step(memory, long_steps / 2, long_steps)
    ask(memory)
    assert restored().step == 3
    assert_same(worker.state, restored().state)


def test_short_steps_with_a_snapshot_each_hold_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop completes the regular copy: it waits for no other state."""
    training = Training()
    snapshots = started(training, every_steps=1)
    stop = snapshots._stop
    assert stop is not None
    stop._steps.append(0.1)
    monkeypatch.setattr(stop, "_patience", lambda: 500.0)
    monkeypatch.setattr(stop_copy, "COPY_SECONDS", 500.0)
    kept: list[int] = []
    real = stop._kept

    def keep(part: Part, *arguments: Any) -> Any:
        kept.append(part.version.step)
        return real(part, *arguments)

    monkeypatch.setattr(stop, "_kept", keep)
    now = [time.perf_counter()]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for step in range(1, 8):
        now[0] += 0.1 if step < 5 else 1.0
        expected = steps(training, snapshots, step, step)
    assert kept == [7], "the median of the last five steps is long then"
    now[0] += 0.1
    ask(memory)
    assert restored().step == 7
    assert_same(expected, restored().state)
    stop._steps.clear()
    stop._steps.append(0.1)
    expected = steps(training, snapshots, 8, 8)
    assert kept == [7]
    asking = asked(memory)
    asking.join(PATIENCE_SECONDS)
    assert not asking.is_alive()
    assert restored().step == 8
    assert_same(expected, restored().state)


def test_launcher_without_a_request_gets_its_copy(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_SECONDS)
        descriptor = os.open(memory, os.O_PATH)
        link.connect(f"/proc/self/fd/{descriptor}/{SOCKET}0")
        os.close(descriptor)
        assert len(link.recv(100)) == ANSWER.size
        assert link.recv(100) == b""
    assert restored().step == 3
    snapshots.close()


def test_wait_for_a_processor_is_no_part_of_the_time_of_a_copy(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training takes it during a regular copy; at a stop it has ended."""
    training = Training()
    snapshots = started(training, every_steps=1)
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        time.sleep(1.0)
        real(self, part, body)

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    steps(training, snapshots, 1, 1)
    snapshots.close()
    stop = snapshots._stop
    assert stop is not None
    assert stop._rates[-1] > stop._size / 0.9


def test_worker_that_hangs_between_a_step_and_save_is_not_waited_for_as_long_as_a_copy(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a collective for the loss: no state will come."""
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 5)
    stop = snapshots._stop
    assert stop is not None
    stop._keep_at -= 1000.0
    stop._rates.append(stop._size / 3.0)  # the copy would take three seconds
    stop._between.extend([0.2] * stop_copy.MEASURED)
    training.optimizer.step()
    waits: list[tuple[float, float]] = []
    real = stop.commit

    def commit(seconds: float, patience: float) -> bool:
        waits.append((seconds, patience))
        return real(seconds, 0.0)

    monkeypatch.setattr(stop, "commit", commit)
    ask(memory)
    [(seconds, patience)] = waits
    assert seconds == stop_copy.COPY_SECONDS
    assert patience == pytest.approx(1.6)


def test_end_of_the_process_waits_for_the_copy_that_the_launcher_has_asked_for(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of `sys.exit(1)`, whose status the interpreter does not record."""
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 2)
    events, begins, ends = slow_copies(monkeypatch)
    asking = asked(memory)
    assert begins.wait(PATIENCE_SECONDS)
    assert snapshots._stop is not None
    stop = weakref.ref(snapshots._stop)
    _finish(None, weakref.ref(snapshots._store), stop, weakref.ref(snapshots))
    events.append("ended")
    ends.set()
    asking.join()
    assert events == ["copied", "ended"]
    assert_same(expected, restored().state)


def test_regular_copy_in_progress_is_completed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    snapshots = started(training, every_steps=2)
    release = threading.Event()
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        assert release.wait(PATIENCE_SECONDS)
        real(self, part, body)

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    monkeypatch.setattr(stop_copy, "OWN_BYTES", 0)  # holds nothing: only regular ones count
    monkeypatch.setattr(stop_copy, "COPY_SECONDS", PATIENCE_SECONDS)
    for step in (1, 2):
        snapshots.save(step, training.state, torch.zeros(1))
    asking = asked(memory)
    time.sleep(0.3)
    assert asking.is_alive()
    release.set()
    asking.join()
    found = restored()
    assert (found.step, found.rank_state is not None) == (2, True)
    assert ask(memory) == 0.0


def test_snapshot_of_all_ranks_and_its_interval_stay(memory: Path) -> None:
    training = Training()
    snapshots = started(training, every_steps=10)
    steps(training, snapshots, 1, 27)
    assert ask(memory)
    parts = sorted(MemoryBuffers(memory, 0).parts())
    assert [part.version.step for part in parts] == [20, 27]
    offers = [Offer(tuple(parts))]
    plan = decide(offers)
    assert plan is not None
    assert plan.version.step == 27
    assert interval_before(plan, offers) == 10
    snapshots.close()
    again = started(training, every_steps=None, max_overhead=0.5)
    assert not again.save(29, training.state)
    assert again.save(30, training.state), "the stop does not postpone it"
    assert not again.save(39, training.state)


def test_large_state_outside_the_optimizers_is_not_held(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_state, "COPIED_BYTES", 190_000)
    training = Training()
    snapshots = started(training)
    average = torch.zeros(10_000)  # beside 160 kB of statistics
    snapshots.save(1, lambda: {**training.state(), "average": average})
    time.sleep(0.05)
    assert ask(memory) == 0.0
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_state_with_a_tensor_without_its_memory_is_not_held(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    snapshots.save(1, training.state)
    training.optimizer.step()
    snapshots.save(2, lambda: {**training.state(), "freed": freed})
    assert ask(memory) == 0.0


def exchange(training: Training) -> None:
    """Validate with other weights, as of a moving average."""
    with torch.no_grad():
        for each in training.model.parameters():
            each.copy_(each + 1)


def exchange_data(training: Training) -> None:
    for each in training.model.parameters():
        each.data.copy_(each.data + 1)


def exchange_data_after_the_first_elements(training: Training) -> None:
    training.model[2].weight.data.view(-1)[1:].add_(1.0)


def clamp(training: Training) -> None:
    with torch.no_grad():
        training.model[2].bias.clamp_(0.5, 0.6)


def change_moments(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


@pytest.mark.parametrize(
    "change",
    [exchange, exchange_data, exchange_data_after_the_first_elements, clamp, change_moments],
)
def test_state_that_something_else_has_changed_is_not_copied(
    memory: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Training], None]
) -> None:
    """A stop during a validation with other weights must not leave them as the training state."""
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    change(training)
    assert ask(memory)
    assert "no copy of step 3 at the stop: something other than the optimizers" in caplog.text
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each collection of the optimizers' tensors is added."""
    made: list[int] = []
    real = held_state.Sources.__init__

    def init(self: held_state.Sources, optimizers: Any) -> None:
        made.append(len(made))
        real(self, optimizers)

    monkeypatch.setattr(held_state.Sources, "__init__", init)
    return made


class Counting(torch.optim.SGD):
    """Optimizer whose state has a number that each step changes."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for each in self.param_groups[0]["params"]:
            self.state[each]["count"] = self.state[each].get("count", 1000) + 1
        return found


def test_tensors_of_the_optimizers_are_collected_once(memory: Path, collected: list[int]) -> None:
    for optimizer in (None, Counting):
        training = Training()
        if optimizer is not None:
            training.optimizer = optimizer(training.model.parameters(), lr=1e-4, momentum=0.9)
        snapshots = started(training)
        collected.clear()
        expected = steps(training, snapshots, 1, 20)
        assert len(collected) == 1
        assert ask(memory)
        assert_same(expected, restored().state)
        snapshots.close()
        for path in memory.iterdir():
            path.unlink()


def replace_moments(training: Training) -> None:
    training.optimizer.load_state_dict(copied(training.optimizer.state_dict()))


def replace_one_moment(training: Training) -> None:
    state = training.optimizer.state[training.model[0].weight]
    state["exp_avg"] = state["exp_avg"] + 1.0


def exchange_moments(training: Training) -> None:
    state = training.optimizer.state[training.model[0].weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def rename_a_value(training: Training) -> None:
    state = training.optimizer.state[training.model[2].bias]
    state["other"] = state.popitem()[1]


def move_a_parameter(training: Training) -> None:
    training.model[0].weight.data = training.model[0].weight.data * 2.0


def shorten_a_parameter(training: Training) -> None:
    training.model[2].bias.data = torch.ones(0)


def add_a_parameter(training: Training) -> None:
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize(
    "change",
    [
        replace_moments,
        replace_one_moment,
        exchange_moments,
        rename_a_value,
        move_a_parameter,
        shorten_a_parameter,
        add_a_parameter,
    ],
)
def test_tensors_that_have_been_replaced_are_collected_again(
    memory: Path, collected: list[int], change: Callable[[Training], None]
) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    collected.clear()
    change(training)
    snapshots.save(4, training.state)
    expected = copied(training.state())
    assert len(collected) == 1
    assert ask(memory)
    assert restored().step == 4
    assert_same(expected, restored().state)


def test_optimizers_state_of_the_step_stays_as_it_was(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 3)
    for state in training.optimizer.state.values():
        state["new"] = torch.ones(3)
        del state["exp_avg"]
    assert ask(memory)
    assert_same(expected, restored().state)


def test_other_tensor_in_the_former_memory_of_an_optimizers_state_is_copied(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    moment = training.optimizer.state[training.model[0].weight]["exp_avg"]
    buffer = torch.empty(0)  # as an allocation that reuses the memory
    buffer.set_(moment.untyped_storage(), 0, moment.shape, moment.stride())
    moment.data = moment.data.clone()
    snapshots.save(4, {**training.state(), "buffer": buffer})
    expected = copied({**training.state(), "buffer": buffer})
    buffer.zero_()
    assert ask(memory)
    assert restored().step == 4
    assert_same(expected, restored().state)


def test_other_name_of_an_optimizers_state_is_not_copied(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_state, "COPIED_BYTES", 0)
    training = Training()
    snapshots = started(training)
    training.backward()
    training.optimizer.step()
    moments = [each["exp_avg"] for each in training.optimizer.state.values()]
    snapshots.save(1, lambda: {"moment": moments[0].detach(), "list": [moments[1].detach()]})
    expected = {"moment": moments[0].clone(), "list": [moments[1].clone()]}
    assert ask(memory)
    found = restored().state
    assert_same(expected["moment"], found["moment"])
    assert_same(expected["list"][0], found["list"][0])


def test_samples_of_each_regular_snapshot_are_elsewhere(memory: Path) -> None:
    training = Training()
    snapshots = started(training, every_steps=4)
    stop = snapshots._stop
    assert stop is not None
    seeds = []
    for step in range(1, 13):
        steps(training, snapshots, step, step)
        assert stop._held is not None
        seeds.append(stop._held.marks.seed)
    # The state of a step with a snapshot is held before that is taken.
    changed = [step for step in range(2, 13) if seeds[step - 1] != seeds[step - 2]]
    assert changed == [5, 9]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1000),
        torch.zeros(20, 30).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(40, 20)[:, ::2],
        torch.zeros(4, 1).expand(4, 100),
        torch.zeros(3),
    ],
)
def test_change_of_any_element_is_found_with_some_seed(tensor: torch.Tensor) -> None:
    seeds = [count / 1000 for count in range(1000)]
    before = [held_state.samples([tensor], seed) for seed in seeds]
    for index in range(0, tensor.numel(), 7):
        flat = tuple(int(at) for at in torch.unravel_index(torch.tensor(index), tensor.shape))
        tensor.data[flat] = 1.0
        assert any(
            held_state.samples([tensor], seed) != found
            for seed, found in zip(seeds, before, strict=True)
        ), index
        tensor.data[flat] = 0.0


def test_tensors_share_the_blocks_and_each_has_its_first_element() -> None:
    tensors = [torch.zeros(1000), torch.zeros(0), torch.zeros(2), torch.zeros(1000)]
    found = [len(each) for each in held_state.samples(tensors, 0.5)]
    blocks = [held_state.BLOCK_BYTES] * (held_state.BLOCKS // len(tensors))
    assert found == [4, 0, 4, 4, *blocks, 8, *blocks]
    freed = torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    assert not any(held_state.samples([freed], 0.5))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_marks_of_many_tensors_have_as_many_blocks_as_those_of_few(
    memory_format: torch.memory_format,
) -> None:
    """They are taken in each step, of hundreds of tensors."""
    kind, many = {"memory_format": memory_format}, 1000
    tensors = [torch.zeros(4, 16, 3, 3).to(**kind) for _ in range(many)]
    found = [len(each) for each in held_state.samples(tensors, 0.5)]
    assert found == [4] * many + [held_state.BLOCK_BYTES] * held_state.BLOCKS
    first = held_state.samples(tensors, 0.5)
    for tensor in tensors:
        tensor.data[1:] = 1.0  # not its first element
    assert held_state.samples(tensors, 0.5) != first
    seeds = [count / 100 for count in range(100)]
    before = [held_state.samples(tensors, seed) for seed in seeds]
    tensors[many // 2].data[1:] = 2.0
    after = [held_state.samples(tensors, seed) for seed in seeds]
    assert sum(one != other for one, other in zip(before, after, strict=True)) in range(1, 100)


class GivesUp(Gang):
    """Gang of two ranks, seen from rank 0; once `fails`, rank 1 has not written its last part."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.fails = False

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        other = content
        if exchange is Exchange.PROPOSALS and self.fails:
            (proposal,) = unpack_proposals([content])
            other = proposal._replace(missing=Missing.MEMORY).packed()
        return [memoryview(bytearray(each)) for each in (content, other)]


@pytest.mark.parametrize("own", [(), (5,)])
def test_state_of_the_step_that_gives_up_the_last_snapshot_follows_the_one_before(
    memory: Path, monkeypatch: pytest.MonkeyPatch, own: tuple[int, ...]
) -> None:
    gang = GivesUp()
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: gang)
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        if part.version.step < 6:  # a stop precedes the copy of step 6
            real(self, part, body)

    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    training = Training()
    snapshots = started(training, every_steps=2, replicas=0)
    steps(training, snapshots, 1, 4, *own)
    gang.fails = True
    steps(training, snapshots, 5, 6, *own)
    assert ask(memory)
    parts = MemoryBuffers(memory, 0).parts()
    [last] = [each for each in parts if each.rank == SHARED and each.version.step == 6]
    assert last.before == 2
    assert sorted(each.version.step for each in parts if each.rank == SHARED) == [2, 6]
    assert bool(own) == (last._replace(rank=0) in parts)


def test_rank_that_holds_nothing_gives_up_a_snapshot_without_another_call_for_its_state(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = GivesUp()
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: gang)
    training = Training()
    snapshots = started(training, every_steps=2, replicas=0)
    steps(training, snapshots, 1, 4, lambda: 5)
    stop, calls = snapshots._stop, []
    assert stop is not None
    stop.agreed(False)
    gang.fails = True
    steps(training, snapshots, 5, 6, lambda: calls.append("called"))
    assert snapshots._newest.step == 6
    assert snapshots._before.step == 2
    assert calls == ["called"]


class Answers(Gang):
    """Gang of two ranks, seen from rank 0; `other` changes the record of rank 1 to an exchange."""

    def __init__(self, other: Callable[[Header], Header]) -> None:
        super().__init__()
        self.size, self._other = 2, other

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        mine = Header(self._call, exchange, len(content), self._step)
        is_proposal = exchange is Exchange.PROPOSALS
        check_calls([mine, self._other(mine) if is_proposal else mine])
        return [memoryview(bytearray(content))] * 2


def ended(_: Header) -> Header:
    raise SnapshotError("rank 1 has ended its process")


def lost(_: Header) -> Header:
    raise RuntimeError("the connection to rank 1 is lost")


@pytest.mark.parametrize(
    ("other", "copied_step"),
    [
        (lambda mine: mine._replace(step=mine.step + 1), 0),
        (lambda mine: mine._replace(call=Call.RESTORE, step=0), 0),
        (lambda mine: mine._replace(exchange=Exchange.STORED), 0),
        (ended, 1),
        (lost, 1),
    ],
)
def test_state_that_the_ranks_refuse_is_not_copied(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: Callable[[Header], Header],
    copied_step: int,
) -> None:
    """The fault of a rank that cannot make this call any more loses no step."""
    gang = Answers(other)
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", lambda _: gang)
    training = Training()
    snapshots = started(training, every_steps=None, replicas=0)
    with pytest.raises((SnapshotError, RuntimeError)):
        steps(training, snapshots, 1, 1)
    stop = snapshots._stop
    assert stop is not None
    stop._keep_at -= 1000.0
    assert stop.commit(1.0) == bool(copied_step)
    parts = MemoryBuffers(memory, 0).parts()
    assert [each.version.step for each in parts] == [copied_step] * bool(copied_step)


@pytest.mark.parametrize("moment", ["_locked", "write"])
def test_change_while_a_copy_waits_or_writes_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    owner: Any = MemoryBuffers if moment == "_locked" else part_files
    name = moment if moment == "_locked" else "pack_record"
    real = getattr(owner, name)

    def change_first(*arguments: Any) -> Any:
        clamp(training)
        return real(*arguments)

    monkeypatch.setattr(owner, name, change_first)
    assert ask(memory)
    assert "no copy of step 3 at the stop: something other than the optimizers" in caplog.text
    assert MemoryBuffers(memory, 0).parts() == {}


def test_parameter_whose_data_is_replaced_keeps_the_value_of_the_step(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    bias = training.model[2].bias
    value = bias.detach().clone()
    snapshots.save(1, {"bias": bias})
    kept, bias.data = bias.data, torch.full_like(value, 9.0)
    bias.data = kept  # as after a validation
    assert ask(memory)
    assert_same(value, restored().state["bias"])
    snapshots.save(2, {"bias": bias})
    bias.data = torch.full_like(value, 9.0)
    assert ask(memory)
    assert_same(value, restored().state["bias"])
    assert restored().step == 1


class OnDevice(torch.nn.Parameter):
    """Parameter with the device of a GPU."""

    device = property(lambda _: torch.device("cuda"))
    is_cpu = property(lambda _: False)


def test_parameters_on_a_device_are_neither_read_nor_held(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a function are unknown at the restore, and a model may move after it."""
    reads: list[int] = []
    monkeypatch.setattr(ctypes, "string_at", lambda address, _: reads.append(address))
    optimizer = torch.optim.SGD([OnDevice(torch.zeros(3))], lr=0.1)
    snapshots = Snapshots(every_steps=EVERY, max_overhead=1.0, optimizers=lambda: optimizer)
    snapshots.restore()
    for step in range(1, 2 * stop_copy.MEASURED):
        snapshots.save(step, {"values": torch.ones(3)})
    assert reads == []  # at an address of a device a read would end the process
    assert snapshots._stop is not None
    assert not snapshots._stop.is_on
    assert ask(memory) == 0.0


def test_rank_without_tensors_holds_nothing(memory: Path) -> None:
    """Such as one of several ranks, of which the first alone collects the state."""
    training = Training()
    snapshots = started(training)
    states: list[Any] = [{}, None, {"model": {}}]
    for step, state in enumerate(states, 1):
        snapshots.save(step, state)
        assert not ask(memory)
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_stop_copies_the_shared_state_beside_the_own_state_of_the_step(memory: Path) -> None:
    training = Training()
    snapshots = started(training, every_steps=4)
    expected = steps(training, snapshots, 1, 5, torch.arange(3))
    snapshots.save(6, training.state, lambda: torch.arange(3) + 6)
    time.sleep(0.05)
    assert ask(memory)
    found = restored()
    assert (found.step, found.lost_steps, found.rank_state.tolist()) == (6, 0, [6, 7, 8])
    assert_same(expected, found.state)


def test_own_states_of_the_last_two_steps_are_in_memory(memory: Path) -> None:
    """The other ranks may hold the step before: this one is killed now."""
    training = Training()
    snapshots = started(training)
    for last in (1, 2, 7):
        steps(training, snapshots, max(1, last - 1), last, torch.arange(3))
        found = {part.version.step for part in MemoryBuffers(memory, 0).parts()}
        assert found == {max(1, last - 1), last}
    assert {path.name for path in memory.glob("own-*")} == {"own-0.0", "own-0.1"}


def test_regular_snapshot_keeps_its_own_parts_until_the_next_one(memory: Path) -> None:
    training = Training()
    snapshots = started(training, every_steps=5)
    steps(training, snapshots, 1, 9, torch.arange(3))  # no stop: the process ends
    snapshots.close()
    found = restored()
    assert (found.step, found.rank_state.tolist()) == (5, [0, 1, 2])


@pytest.mark.parametrize("regular", [2, 3, 4, 5])
def test_restore_of_a_copy_at_a_stop_keeps_the_own_state_of_the_snapshot_before_it(
    memory: Path, regular: int
) -> None:
    """If a node is lost before its new copies are complete, that one is restored."""
    training = Training()
    snapshots = started(training, every_steps=2)
    last = 2 * regular
    steps(training, snapshots, 1, last + 1, torch.arange(3))
    assert ask(memory)
    assert restored().step == last + 1
    for name in ("shared", "rank-0"):
        parts = [part_files.held(path) for path in memory.glob(f"{name}.[01]")]
        assert {part.version.step for part in parts if part} == {last, last + 1}


def test_large_own_state_is_not_held(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    snapshots = started(training, every_steps=2)
    monkeypatch.setattr(stop_copy, "OWN_BYTES", 1000)
    steps(training, snapshots, 1, 5, torch.zeros(1000))
    assert ask(memory) == 0.0
    found = restored()
    assert (found.step, found.rank_state.numel()) == (4, 1000)


@pytest.mark.parametrize("kind", [OSError, TypeError])
def test_own_state_that_cannot_be_written_leaves_the_last_snapshot(
    memory: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    training = Training()
    snapshots = started(training, every_steps=2)
    steps(training, snapshots, 1, 3, torch.arange(3))

    def fail(*_: object) -> None:
        raise kind(errno.ENOSPC, "full")

    monkeypatch.setattr(MemoryBuffers, "commit_own", fail)
    steps(training, snapshots, 4, 5, torch.arange(3))
    assert ask(memory) == 0.0
    found = restored()
    assert (found.step, found.rank_state.tolist()) == (4, [0, 1, 2])


def own(step: int, rank: int, ranks: int = 2) -> Part:
    return part_at_stop(Version(step, 7), 5, ranks)._replace(rank=rank)


@pytest.mark.parametrize(
    ("there", "local_ranks", "is_written"),
    [
        ([own(8, 0), own(8, 1)], 2, True),
        ([own(8, 0), own(7, 1)], 2, False),  # rank 1 was killed before its own state of the step
        ([own(7, 0), own(7, 1)], 2, False),
        ([own(8, 0)], 1, True),  # rank 1 is on another node
        ([own(8, 3)], 0, True),
        ([], 0, False),
        ([own(8, 0), own(8, 1, 3)], 2, False),
    ],
)
def test_copy_needs_the_own_states_of_all_ranks_of_the_node(
    memory: Path, there: list[Part], local_ranks: int, is_written: bool
) -> None:
    body = Body(0, [memoryview(b"x")])
    for part in there:
        MemoryBuffers(memory, part.rank).commit_own(part, body)
    node = MemoryBuffers(memory, 0, local_ranks=local_ranks)
    shared_part = part_at_stop(Version(8, 7), 5, 2)
    assert node.commit_at_stop(shared_part, body, Version(5, 7), 1.0) is is_written
    assert (shared_part in node.parts()) is is_written


def test_own_states_of_former_workers_are_removed(memory: Path) -> None:
    body = Body(0, [memoryview(b"x")])
    for rank in (0, 1):
        MemoryBuffers(memory, rank).commit_own(own(8, rank), body)
    MemoryBuffers(memory, 0, local_ranks=1).remove_former()
    assert {path.name for path in memory.iterdir()} == {"own-0.0"}


@pytest.mark.parametrize(
    ("copy_seconds", "trained_seconds", "is_made"),
    [(5.0, 4.0, False), (5.0, 1000.0, True), (15.0, 1000.0, False)],
)
def test_copy_that_takes_longer_than_the_steps_is_not_made(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    copy_seconds: float,
    trained_seconds: float,
    is_made: bool,
) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 3)
    stop = snapshots._stop
    assert stop is not None
    stop._rates.append(stop._size / copy_seconds)
    now = time.monotonic()
    stop._keep_at = now - trained_seconds
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        assert (ask(memory) > 0.0) is is_made
    made = [path for path in memory.iterdir() if path.name.startswith("shared")]
    assert bool(made) is is_made


def test_costly_state_is_given_up_and_tried_again_ever_more_rarely(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    training = Training()
    snapshots = started(training, every_steps=10)
    calls: list[int] = []

    def state() -> dict[str, Any]:
        calls.append(step)
        now[0] += 0.9  # of a step of one second
        return training.state()

    for step in range(1, 100):
        now[0] = float(step)
        snapshots.save(step, state)
    undue = [step for step in calls if step % 10]
    # After one, two and four regular snapshots.
    assert undue == [*range(1, 6), *range(11, 16), *range(31, 36), *range(71, 76)]


@pytest.mark.parametrize(("slow", "is_on"), [(3, True), (4, False)])
def test_single_slow_calls_do_not_end_the_holding_of_states(
    memory: Path, monkeypatch: pytest.MonkeyPatch, slow: int, is_on: bool
) -> None:
    """Such as on a machine that is busy after a restart: the lower quartile counts."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    training = Training()
    snapshots = started(training)

    def state() -> dict[str, Any]:
        now[0] += 0.9 if step <= slow else 0.01
        return training.state()

    for step in range(1, interval.FIRST_COSTS + 2):
        now[0] = float(step)
        snapshots.save(step, state)
    assert snapshots._stop is not None
    assert snapshots._stop.is_on is is_on


def policy(costs: list[float], most: float = 0.1) -> HoldPolicy:
    """Return a policy that has measured costs of steps of one second."""
    made = HoldPolicy(most / interval.HELD_SHARE)
    for each in costs:
        made.took(each)
    return made


@pytest.mark.parametrize(
    ("costs", "wants"),
    [
        ([], True),
        ([9.0] * 4, True),  # too few
        ([0.11] * 5, False),
        ([0.1] * 5, True),
        ([0.1] * 2 + [9.0] * 3, True),
        ([0.1] + [9.0] * 4, False),
        ([9.0] * 14 + [0.1] * 6, True),
        ([9.0] * 15 + [0.1] * 5, False),
        ([0.1] * 50 + [9.0] * 14, True),
        ([0.1] * 50 + [9.0] * 15, False),
    ],
)
def test_lower_quartile_of_the_last_costs_decides(costs: list[float], wants: bool) -> None:
    assert policy(costs).proposed(1.0, is_on=True) is wants


def test_rank_that_has_given_up_proposes_again_after_one_two_four_and_more_snapshots() -> None:
    found = policy([0.5] * 5)
    rounds = []
    is_on = True
    for count in range(1, 100):
        wants = found.proposed(1.0, is_on=is_on)
        if is_on and not wants:
            rounds.append(count)
        if not is_on and wants:
            for _ in range(5):
                found.took(0.5)
        is_on = wants
    assert [after - before for before, after in itertools.pairwise(rounds)][:6] == [
        2,
        3,
        5,
        9,
        17,
        17,
    ]


def test_cost_that_falls_again_ends_the_longer_waits() -> None:
    found = policy([])
    found.is_refused = True
    waits = []
    for costs in ([0.5] * 5, [0.5] * 5, [0.05] * 20, [0.5] * 20):
        assert not found.proposed(1.0, is_on=True)
        waits.append(1)
        while not found.proposed(1.0, is_on=False):
            waits[-1] += 1
        for each in costs:
            found.took(each)
        if costs[0] < 0.1:
            assert found.proposed(1.0, is_on=True)
            found.took(0.5)
            found.is_refused = True
    assert waits == [1, 2, 4, 1]


def test_second_restore_and_close_hold_nothing(memory: Path) -> None:
    training = Training()
    snapshots = started(training)
    steps(training, snapshots, 1, 2)
    snapshots.restore()
    assert snapshots._stop is not None
    assert snapshots._stop._held is None
    steps(training, snapshots, 1, 2)
    snapshots.close()
    with pytest.raises(OSError, match="refused"):
        ask(memory)
    assert not [path for path in memory.iterdir() if path.name.startswith("shared")]


def test_hook_and_thread_end_with_unused_snapshots(memory: Path) -> None:
    training = Training()
    steps(training, started(training), 1, 2)
    gc.collect()
    assert not training.optimizer._optimizer_step_pre_hooks
    limit = time.monotonic() + PATIENCE_SECONDS
    while "elasticjob-stop-copy" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < limit
        time.sleep(0.01)


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a process that then waits for its end; return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitpid(pid, 0)[1]


def test_any_local_rank_copies_and_the_others_find_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    training = Training()
    snapshots = started(training)
    expected = steps(training, snapshots, 1, 3)
    assert ask(memory, 1)
    assert_same(expected, restored().state)
    version = restored_version(memory)
    stamp = {path.name: path.stat().st_mtime_ns for path in memory.glob("shared.*")}
    for local_rank, step in ((0, 3), (2, 2)):  # the same step, and one behind
        other = MemoryBuffers(memory, local_rank)
        part = part_at_stop(Version(step, version.gang), 5)
        body = Body(0, [memoryview(b"x")])
        assert other.commit_at_stop(part, body, Version(0, 0), 1.0)
    assert stamp == {path.name: path.stat().st_mtime_ns for path in memory.glob("shared.*")}


def restored_version(memory: Path) -> Version:
    return max(MemoryBuffers(memory, 0).parts()).version


def test_only_one_local_rank_writes_at_a_time(memory: Path) -> None:
    first, second = MemoryBuffers(memory, 0), MemoryBuffers(memory, 1)
    body = Body(0, [memoryview(b"x")])
    part = part_at_stop(Version(3, 7), 5)
    with first._locked(1.0) as is_locked:
        assert is_locked
        assert not second.commit_at_stop(part, body, Version(0, 0), 0.1)
    assert second.commit_at_stop(part, body, Version(0, 0), 0.1)
    assert list(second.parts()) == [part]


def shared(step: int, gang: int = 7, before: int = 0) -> Part:
    return Part(Version(step, gang), SHARED, 0, before)


@pytest.mark.parametrize(
    ("there", "keep", "expected"),
    [
        ([None, None], 0, 0),
        ([shared(20), None], 20, 1),
        ([shared(20), shared(10)], 20, 1),
        ([shared(10), shared(20)], 20, 0),
        ([shared(24), shared(20)], 20, 0),  # another rank was a step behind
        ([shared(20), shared(24)], 99, 0),  # the newest is kept without another word
        ([shared(25), shared(20)], 20, None),
        ([shared(26), shared(20)], 20, None),
        ([shared(40, gang=6), shared(20)], 20, 0),  # of an earlier gang, passed over as damaged
        ([shared(40, gang=6), None], 20, 1),
    ],
)
def test_buffer_of_a_copy_at_a_stop(
    there: list[Part | None], keep: int, expected: int | None
) -> None:
    assert buffer_at_stop(there, shared(25), Version(keep, 7)) == expected


@pytest.mark.parametrize("step", [50, 30, 1, 0])
def test_interval_of_an_early_stop_may_be_longer_than_the_training(
    tmp_path: Path, step: int
) -> None:
    """The snapshots of the first steps measure; after a fault they are not taken again."""
    memory, part = MemoryBuffers(tmp_path, 0), part_at_stop(Version(step, 7), 40)
    assert memory.commit_at_stop(part, Body(0, [memoryview(b"content")]), Version(0, 0), 60.0)
    (offer,) = offers = [Offer(tuple(memory.parts()))]
    assert offer.memory == (part,)
    assert interval_before(decide(offers), offers) == 40


def test_worker_killed_at_any_call_of_the_copy_leaves_the_last_snapshot(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    snapshots = started(training, every_steps=10)
    expected = steps(training, snapshots, 1, 20)
    snapshots.close()
    before = {path.name: path.read_bytes() for path in memory.glob("shared.*")}
    body = Body(3, [memoryview(bytes(5000)), memoryview(b"end")])
    version = restored_version(memory)
    part = part_at_stop(Version(24, version.gang), 10)

    class Os:
        def __init__(self, last: int) -> None:
            self.calls, self.last = 0, last

        def __getattr__(self, name: str) -> Any:
            real = getattr(os, name)
            if name not in ("open", "pwrite", "pwritev", "ftruncate", "posix_fallocate", "close"):
                return real

            def call(*arguments: Any) -> Any:
                self.calls += 1
                if self.calls == self.last:
                    if name == "pwritev":
                        os.pwrite(arguments[0], bytes(arguments[1][0][:2500]), arguments[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            return call

    def commit(last: int) -> None:
        counted = Os(last)
        monkeypatch.setattr(buffers, "os", counted)
        monkeypatch.setattr(part_files, "os", counted)
        MemoryBuffers(memory, 0).commit_at_stop(part, body, version, 1.0)
        os._exit(0)

    for last in range(1, 60):
        status = fork(functools.partial(commit, last))
        found = MemoryBuffers(memory, 0).parts()
        if status == 0:
            assert max(found) == part
            assert last > 10
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        if max(found) != part:  # else the record, which is written last, was complete
            assert restored().step == 20
            assert_same(expected, restored().state)
        for name, content in before.items():
            (memory / name).write_bytes(content)
    else:
        raise AssertionError("the copy never came to its end")


class Fault(RuntimeError):
    """Error of a collective, as of a lost connection."""


ENDS = """
import multiprocessing, os, sys, time
from pathlib import Path
import torch
from elasticjob.train import Snapshots

def train(folder, error):
    os.environ["ELASTICJOB_SNAPSHOT_FOLDER"] = str(folder)
    folder.mkdir()
    values = torch.nn.Parameter(torch.zeros(9))
    optimizer = torch.optim.SGD([values], lr=1.0)
    snapshots = Snapshots(every_steps=1000, optimizers=optimizer)
    keep.append(snapshots)
    snapshots.restore()
    for step in (1, 2, 3):
        values.grad = torch.ones(9)
        optimizer.step()
        snapshots.save(step, {"values": values.detach()})
    time.sleep(0.05)
    if error is not None:
        raise error

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports for several seconds, which forks inherit
keep, top = [], Path(sys.argv[1])
for number, error in enumerate([RuntimeError("lost"), SystemExit(1), SystemExit(0), None]):
    arguments = top / str(number), error
    child = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    child.start()
    child.join()
train(top / "main", RuntimeError("lost"))
"""


def test_worker_that_ends_with_an_exception_copies_by_itself(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], stderr=subprocess.PIPE, text=True, timeout=240
    )
    assert ended.returncode == 1, ended.stderr
    found = {}
    for name in ("0", "1", "2", "3", "main"):
        parts = MemoryBuffers(tmp_path / name, 0).parts()
        found[name] = [part.version.step for part in parts]
    assert found == {"0": [3], "1": [3], "2": [], "3": [], "main": [3]}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (None, None, False),
        (Fault, Fault("lost"), True),
        (KeyboardInterrupt, KeyboardInterrupt(), True),
        (SystemExit, SystemExit(0), False),
        (SystemExit, SystemExit(), False),
        (SystemExit, SystemExit("message"), True),
    ],
)
def test_end_of_a_program(
    monkeypatch: pytest.MonkeyPatch, kind: Any, value: Any, expected: bool
) -> None:
    """The interpreter records the exception before it calls the functions of the end."""
    monkeypatch.setattr(sys, "last_type", kind, raising=False)
    monkeypatch.setattr(sys, "last_value", value, raising=False)
    assert ended_with_error() is expected


def test_copy_that_fails_leaves_a_warning(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    snapshots = started(training)
    snapshots.save(1, lambda: {**training.state(), "object": object()})
    time.sleep(0.05)
    with caplog.at_level(logging.WARNING, "elasticjob.train"):
        assert ask(memory)
    assert "no copy of step 1 at the stop" in caplog.text

    def fail(_: object) -> Body:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(stop_copy, "encode", fail)
    snapshots.save(2, training.state)
    assert ask(memory)
    assert "no copy of step 2 at the stop: not enough memory" in caplog.text
    monkeypatch.setattr(stop_copy, "encode", lambda _: Body(0, [memoryview(bytes(10))]))
    snapshots.save(3, training.state)
    assert ask(memory)
    assert [part.version.step for part in MemoryBuffers(memory, 0).parts()] == [3]


def test_launcher_and_worker_agree_on_the_format() -> None:
    mine = (SOCKET, MAGIC, ANSWER.format, stop_copy.COPY_SECONDS)
    theirs = stop_copies
    assert mine == (theirs.SOCKET, theirs.MAGIC, theirs.ANSWER.format, theirs.COPY_SECONDS)
