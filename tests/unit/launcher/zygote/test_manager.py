"""Launcher's side of the standby: restart, failure, and the second attempt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob_launcher.settings import Limits
from elasticjob_launcher.wire import Prepare
from elasticjob_launcher.zygote import manager as standbys
from elasticjob_launcher.zygote.fork_requests import ForkRequest
from elasticjob_launcher.zygote.manager import (
    LOOK_SECONDS,
    MOST_REFUSALS,
    MOST_STARTS,
    REST_SECONDS,
    SETTLED_SECONDS,
    STALLED_SECONDS,
    ZygoteManager,
    wait_seconds,
)
from elasticjob_launcher.zygote.preload_cache import AFTER_SECONDS
from elasticjob_launcher.zygote.process import ZygoteEvents, ZygoteProcess, activity


class Due:
    """Timer of the loop below."""

    def __init__(self, seconds: float, action: Callable[[], object]) -> None:
        self.seconds = seconds
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Event loop that runs its timers on request."""

    def __init__(self) -> None:
        self.timers: list[Due] = []

    def call_later(self, seconds: float, action: Callable[[], object]) -> Due:
        self.timers.append(Due(seconds, action))
        return self.timers[-1]

    def due(self, seconds: float) -> list[Due]:
        return [one for one in self.timers if one.seconds == seconds and not one.cancelled]


class Process:
    """Standby process controlled by the test."""

    made: list[Process] = []  # noqa: RUF012
    pid = 0

    def __init__(self, on: ZygoteEvents) -> None:
        self.on = on
        self.ended = False
        self.asked: dict[str, Any] = {}
        Process.made.append(self)

    @classmethod
    def start(
        cls, loop: Any, output: Any, wanted: Any, env: Mapping[str, str], keep: Sequence[int],
        on: ZygoteEvents,
    ) -> Process:  # fmt: skip
        return cls(on)

    def request_successor(self, message: dict[str, Any], on: ZygoteEvents) -> Process:
        successor = Process(on)
        successor.asked = message
        return successor

    def replace(self, predecessor: Process, on: ZygoteEvents) -> None:
        self.on, predecessor.ended = on, True

    def says(self, message: dict[str, Any]) -> None:
        self.on.message(message)

    def dies(self, reason: str) -> None:
        self.on.lost(reason)

    def send(self, message: dict[str, Any]) -> None:
        self.asked = message

    def pass_on(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        os.write(fds[-1], b"1")

    def end(self) -> None:
        self.ended = True


class Output:
    said: list[str] = []  # noqa: RUF012

    def write_line(self, text: str) -> None:
        Output.said.append(text)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def settled() -> list[tuple[bool, str]]:
    """Return the states that the zygote below reports."""
    return []


@pytest.fixture(autouse=True)
def zygote(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, settled: list[tuple[bool, str]]
) -> ZygoteManager:
    """Return a zygote that is preloading."""
    monkeypatch.setattr(standbys, "ZygoteProcess", Process)
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(Output, "said", [])
    zygote = ZygoteManager(
        loop, Output(), {}, (), Limits(), lambda ready, why: settled.append((ready, why))  # type: ignore[arg-type]
    )  # fmt: skip
    zygote.prepare(Prepare((sys.executable, "train.py"), {}, (), ""))
    return zygote


def test_zygote_that_keeps_dying_is_given_up_and_retried_later(
    loop: Loop, settled: list[tuple[bool, str]]
) -> None:
    for rest in (REST_SECONDS, 2 * REST_SECONDS):
        for _ in range(MOST_STARTS):
            assert not loop.due(rest)
            Process.made[-1].dies("it ended")
        assert settled.pop() == (False, f"given up after {MOST_STARTS} standbys: it ended")
        (later,) = loop.due(rest)
        later.action()
        later.cancel()
    Process.made[-1].says({"is": "ready"})
    assert settled == [(True, "")]


def test_zygote_with_unsafe_preload_is_replaced(
    loop: Loop, settled: list[tuple[bool, str]]
) -> None:
    for number in range(MOST_REFUSALS):
        assert not settled
        refused = {f"package{number}": "it starts threads"}
        Process.made[-1].says({"is": "unfit", "refused": refused, "reason": ""})
    assert settled == [(False, f"given up after {MOST_REFUSALS} standbys: it starts threads")]


def test_zygote_that_refuses_same_package_again_is_given_up_sooner(
    loop: Loop, settled: list[tuple[bool, str]]
) -> None:
    while not settled:
        Process.made[-1].says(
            {"is": "unfit", "refused": {"package": "it reads RANK"}, "reason": ""}
        )
    assert len(Process.made) == MOST_STARTS + 1


def learning(loop: Loop, zygote: ZygoteManager, *names: str) -> tuple[Process, Process]:
    """Fork a worker; return the process and its successor, which imports these modules."""
    (first,) = Process.made
    first.says({"is": "ready"})
    zygote.fork([ForkRequest({}, 1, 2)])
    (timer,) = loop.due(AFTER_SECONDS[0])
    timer.action()
    first.says({"is": "recorded", "names": list(names)})
    successor = Process.made[-1]
    assert successor is not first
    successor.says({"is": "forked", "pid": os.getpid()})
    return first, successor


def test_zygote_stays_ready_while_its_successor_imports(
    loop: Loop, zygote: ZygoteManager, settled: list[tuple[bool, str]]
) -> None:
    first, successor = learning(loop, zygote, "sympy")
    assert (zygote.settled, zygote.reason) == (True, "")
    successor.says({"is": "learned"})
    assert (first.ended, successor.ended, zygote.reason) == (True, False, "")
    assert settled == [(True, "")]
    successor.dies("the standby ended with signal 9")
    assert zygote.reason == "the standby is still preloading"


def test_recorded_modules_are_imported_without_a_refused_one(
    loop: Loop, zygote: ZygoteManager, settled: list[tuple[bool, str]]
) -> None:
    first, successor = learning(loop, zygote, "sympy", "pandas", "torch._dynamo")
    refused = {"pandas": "it starts threads"}
    successor.says({"is": "unfit", "refused": refused, "reason": ""})
    assert (first.ended, successor.ended, zygote.reason) == (False, True, "")
    assert Process.made[-1].asked == {"do": "learn", "workers": 1, "excluded": ["pandas"]}
    first.dies("the standby ended with signal 9")
    assert Process.made[-1].asked["learned"] == ["sympy", "pandas", "torch._dynamo"]
    assert Process.made[-1].asked["excluded"] == ["pandas"]
    assert settled == [(True, "")]


def test_recorded_module_at_whose_import_the_successor_dies_is_excluded(
    loop: Loop, zygote: ZygoteManager
) -> None:
    first, successor = learning(loop, zygote, "good", "bad")
    for name in ("good", "bad"):
        successor.says({"is": "importing", "module": name})
    successor.dies("the standby ended with signal 11")
    assert (first.ended, zygote.reason) == (False, "")
    assert Process.made[-1].asked["excluded"] == ["bad"]
    assert Output.said == ["not preloaded: bad: the standby ended with signal 11"]


def test_recorded_module_at_whose_import_a_loading_zygote_dies_is_excluded(
    loop: Loop, zygote: ZygoteManager
) -> None:
    first, _ = learning(loop, zygote, "good", "bad")
    first.dies("the standby ended with signal 11")  # at rest: no module is to blame
    assert Process.made[-1].asked["excluded"] == []
    for name in ("good", "bad"):
        Process.made[-1].says({"is": "importing", "module": name})
    Process.made[-1].dies("the standby ended with signal 11")
    assert Process.made[-1].asked["excluded"] == ["bad"]


def test_successor_without_anything_to_import_is_forgotten(
    loop: Loop, zygote: ZygoteManager
) -> None:
    first, successor = learning(loop, zygote)
    successor.dies("")
    assert (len(Process.made), first.ended, zygote.reason) == (2, False, "")
    (later,) = loop.due(AFTER_SECONDS[1])
    later.action()
    assert len(Process.made) == 3


def test_successors_that_refuse_module_after_module_are_given_up(
    loop: Loop, zygote: ZygoteManager
) -> None:
    first, _ = learning(loop, zygote, "pandas")
    for number in range(2 * MOST_REFUSALS):
        refused = {f"package{number}": "it starts threads"}
        if Process.made[-1].ended:
            break
        Process.made[-1].says({"is": "unfit", "refused": refused, "reason": ""})
    assert len(Process.made) == 2 + MOST_REFUSALS
    assert (first.ended, zygote.reason) == (False, "")


def test_successor_beyond_a_limit_is_ended_and_the_zygote_stays(
    loop: Loop, zygote: ZygoteManager
) -> None:
    first, successor = learning(loop, zygote, "greedy")
    successor.says({"is": "importing", "module": "greedy"})
    zygote._import_limits._limits = Limits(most_bytes=-1)
    successor.says({"is": "learned"})
    assert (first.ended, successor.ended, zygote.reason) == (False, True, "")
    assert Output.said == ["not preloaded: greedy: the standby grew over -1 MiB, importing greedy"]


def test_fork_ends_the_successor(loop: Loop, zygote: ZygoteManager) -> None:
    _, successor = learning(loop, zygote, "sympy")
    zygote.fork([ForkRequest({}, 1, 2)])
    assert successor.ended


def test_refusals_of_one_package_and_reason_are_one_line() -> None:
    refused = {
        "datasets": "it imports pandas",
        "datasets.config": "it imports pandas",
        "datasets.table": "it imports pandas",
        "pandas": "it starts threads",
        "pyarrow": "it starts threads",
        "pyarrow.fs": "it imports pandas",
    }
    assert list(standbys.refusal_lines(refused)) == [
        "datasets and 2 modules of datasets: it imports pandas",
        "pandas: it starts threads",
        "pyarrow: it starts threads",
        "pyarrow.fs: it imports pandas",
    ]


@pytest.mark.parametrize(
    ("load_seconds", "elapsed_seconds", "expected"),
    [
        (0.0, 0.0, 5.0),
        (0.0, 12.0, 12.0),
        (0.0, 30.0, 20.0),
        (8.0, 0.0, 0.0),
        (8.0, 1.0, 0.0),
        (8.0, 3.0, 8.0),
        (8.0, 30.0, 8.0),
        (1.0, 0.0, 2.0),
        (45.0, 7.0, 0.0),
        (45.0, 30.0, 45.0),
    ],
)
def test_workers_wait_for_a_zygote_with_a_lead_as_long_as_a_cold_start_takes(
    load_seconds: float, elapsed_seconds: float, expected: float
) -> None:
    assert wait_seconds(load_seconds, elapsed_seconds) == expected


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the manager's time, which the test changes, and its activity, as a second item."""
    now = [100.0, 0.0]
    monkeypatch.setattr("elasticjob_launcher.zygote.manager.time.monotonic", lambda: now[0])
    monkeypatch.setattr(standbys, "activity", lambda pid: int(now[1]))
    return now


def loading(zygote: ZygoteManager, clock: list[float], load: float, lead: float) -> None:
    """Let a load take `load` seconds, and the next one run for `lead` seconds."""
    zygote.prepare(Prepare((sys.executable, "other.py"), {}, (), ""))
    clock[0] += load
    Process.made[-1].says({"is": "ready"})
    Process.made[-1].dies("it ended")
    clock[0] += lead
    assert not zygote.settled


def test_workers_start_cold_at_once_beside_a_zygote_without_a_lead(
    loop: Loop, zygote: ZygoteManager, clock: list[float]
) -> None:
    loading(zygote, clock, load=12.0, lead=1.0)
    gone: list[str] = []
    zygote.when_settled(lambda: gone.append(zygote.reason))
    assert gone == ["the standby is still preloading"]


def test_load_on_busy_processors_is_no_estimate_of_the_next_one(
    zygote: ZygoteManager, clock: list[float]
) -> None:
    """Its processor time is limited, not its duration; a sixth of it would be a lead."""
    loading(zygote, clock, load=9 * Limits().seconds, lead=Limits().seconds / 2)
    gone: list[str] = []
    zygote.when_settled(lambda: gone.append(zygote.reason))
    assert gone == []


def test_workers_wait_for_a_zygote_that_works_and_not_for_one_that_stalls(
    loop: Loop, zygote: ZygoteManager, clock: list[float]
) -> None:
    loading(zygote, clock, load=12.0, lead=5.0)
    gone: list[str] = []
    zygote.when_settled(lambda: gone.append(zygote.reason))
    Process.made[-1].says({"is": "importing", "module": "torch"})
    for step in range(40):
        clock[0] += LOOK_SECONDS
        clock[1] += step < 20
        loop.due(LOOK_SECONDS)[-1].action()
        assert bool(gone) == (step >= 20 + STALLED_SECONDS / LOOK_SECONDS - 1), step
        if gone:
            break
    assert gone == ["the standby is still preloading, stalled at torch"]


def test_workers_start_cold_at_once_if_the_zygote_they_wait_for_begins_again(
    loop: Loop, zygote: ZygoteManager, clock: list[float]
) -> None:
    loading(zygote, clock, load=12.0, lead=6.0)
    gone: list[str] = []
    zygote.when_settled(lambda: gone.append(zygote.reason))
    assert not gone
    Process.made[-1].says({"is": "unfit", "refused": {"pkg": "it starts threads"}, "reason": ""})
    assert gone == ["the standby is still preloading, again: it starts threads"]
    Process.made[-1].says({"is": "ready"})
    assert zygote.reason == ""
    loop.due(12.0)[-1].action()  # the maximum wait, which nobody waits for any more
    assert len(gone) == 1


def test_attempts_that_fail_after_a_long_load_are_given_up(
    zygote: ZygoteManager, clock: list[float], settled: list[tuple[bool, str]]
) -> None:
    for number in range(MOST_STARTS):
        assert not settled
        clock[0] += 2 * SETTLED_SECONDS
        if number % 2:
            Process.made[-1].dies("it ended")
        else:
            refused = {"package": "it reads RANK"}
            Process.made[-1].says({"is": "unfit", "refused": refused, "reason": ""})
    assert not settled, "the first refusal allowed one more"
    clock[0] += 2 * SETTLED_SECONDS
    Process.made[-1].dies("it ended")
    assert settled == [(False, f"given up after {MOST_STARTS + 1} standbys: it ended")]


@pytest.mark.parametrize(
    ("ready_seconds", "starts"), [(1.0, MOST_STARTS), (SETTLED_SECONDS + 1, 11)]
)
def test_only_a_zygote_that_was_ready_for_a_while_is_replaced_without_limit(
    zygote: ZygoteManager, clock: list[float], ready_seconds: float, starts: int
) -> None:
    for _ in range(10):
        clock[0] += 2 * SETTLED_SECONDS
        Process.made[-1].says({"is": "ready"})
        clock[0] += ready_seconds
        Process.made[-1].dies("it ended")
        if zygote.settled:
            break
    assert len(Process.made) == starts


def test_activity_grows_while_a_process_computes() -> None:
    before = activity(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    after = activity(os.getpid())
    assert before is not None
    assert after is not None
    assert after > before


def test_activity_of_a_process_that_is_gone_is_unknown() -> None:
    assert activity(0) is None


def test_activity_of_a_sleeping_interpreter_does_not_grow() -> None:
    code = "import sys, time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = [activity(process.pid)]
        until = time.monotonic() + 60
        while len(found) < 2 or found[-1] != found[-2]:  # it may not sleep yet
            assert time.monotonic() < until
            time.sleep(0.3)
            found.append(activity(process.pid))
        assert found[-1] is not None
        process.kill()


def test_pending_messages_of_a_process_that_is_given_up_have_no_effect(tmp_path: Path) -> None:
    """The launcher ends a successor that has just loaded, to start workers at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard: list[Any] = []
    loop: Any = SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None)
    output: Any = None
    process = ZygoteProcess(loop, output, ours, ZygoteEvents(heard.append, heard.append))
    made = tmp_path / "made"
    made.touch()
    with theirs:
        for message in ({"is": "importing", "module": "x"}, {"is": "made", "path": str(made)}):
            theirs.send(json.dumps(message).encode())
        process.end()
    assert heard == []
    assert not made.exists()
