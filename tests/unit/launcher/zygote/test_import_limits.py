"""Limits of the zygote's imports: processor time, time without any, duration, and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from elasticjob_launcher.settings import Limits
from elasticjob_launcher.zygote import process as zygote_process
from elasticjob_launcher.zygote.process import (
    CHECK_SECONDS,
    WALL_FACTOR,
    ImportLimits,
    processor_seconds,
)


class Timer:
    """Timer that a test never cancels."""

    def cancel(self) -> None:
        raise AssertionError("nothing ends the limits here")


class Machine:
    """Event loop, clock and processor time of a process that gets a part of a processor."""

    def __init__(self) -> None:
        self.now, self.used = 100.0, 3.0
        self.action: Callable[[], object] | None = None
        self.found: list[tuple[str, bool]] = []

    def call_later(self, seconds: float, action: Callable[[], object]) -> Timer:
        assert seconds == CHECK_SECONDS
        self.action = action
        return Timer()

    def begin(self, limits: Limits) -> ImportLimits:
        found = ImportLimits(self, limits)  # type: ignore[arg-type]
        found.begin(1, "preloading", lambda reason, slow: self.found.append((reason, slow)))
        return found

    def run(self, seconds: float, share: float, each: float = CHECK_SECONDS) -> None:
        """Let the process use this share of a processor, with a check after `each` seconds."""
        until = self.now + seconds
        while self.now < until and not self.found:
            self.now += each
            self.used += share * each
            action, self.action = self.action, None
            assert action is not None
            action()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(zygote_process, "processor_seconds", lambda _: machine.used)
    monkeypatch.setattr(zygote_process, "_resident_bytes", lambda _: 1 << 20)
    return machine


def test_imports_that_get_a_tenth_of_a_processor_may_take_longer(machine: Machine) -> None:
    machine.begin(Limits())
    machine.run(500, share=0.1)
    assert not machine.found


def test_processor_time_above_the_limit_ends_the_imports(machine: Machine) -> None:
    machine.begin(Limits()).imports("torch")
    machine.run(118, share=0.5)
    assert not machine.found
    machine.run(3, share=0.5)
    reason = "preloading took longer than 60 s of processor time, importing torch"
    assert machine.found == [(reason, True)]


def test_threads_that_run_side_by_side_count_once(machine: Machine) -> None:
    machine.begin(Limits())
    machine.run(59, share=16.0)
    assert not machine.found
    machine.run(2, share=16.0)
    assert machine.found == [("preloading took longer than 60 s of processor time", True)]


def test_imports_that_use_no_processor_are_ended_after_the_same_time(machine: Machine) -> None:
    machine.begin(Limits()).imports("greedy")
    machine.run(50, share=0.0)
    machine.run(1, share=0.01)
    machine.run(59, share=0.0)
    assert not machine.found
    machine.run(2, share=0.0)
    assert machine.found == [("preloading used no processor for 60 s, importing greedy", True)]


def test_pause_of_the_launcher_is_no_time_without_work(machine: Machine) -> None:
    machine.begin(Limits())
    machine.run(300, share=0.0, each=100)
    assert not machine.found


def test_duration_of_all_imports_is_limited(machine: Machine) -> None:
    machine.begin(Limits(30))
    machine.run(WALL_FACTOR * 30 - 1, share=0.01)
    assert not machine.found
    machine.run(2, share=0.01)
    assert machine.found == [("preloading took longer than 300 s", True)]


@pytest.mark.parametrize("limit", [0.0, 5.0])
def test_unknown_processor_time_counts_as_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    monkeypatch.setattr(zygote_process, "processor_seconds", lambda _: None)
    machine.begin(Limits(limit))
    machine.run(limit, share=0.0)
    reason = f"preloading took longer than {limit:g} s of processor time"
    assert machine.found == [(reason, True)]


def test_memory_above_the_limit_is_no_reason_for_another_attempt(machine: Machine) -> None:
    machine.begin(Limits(most_bytes=1000))
    assert machine.found == [("the standby grew over 0 MiB", False)]


def test_processor_time_of_this_process_is_known() -> None:
    """Within the ticks of the kernel."""
    before = time.process_time()
    found = processor_seconds(os.getpid())
    assert found is not None
    assert before - 0.1 <= found <= time.process_time() + 0.1
    assert processor_seconds(0) is None
