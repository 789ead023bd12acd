"""Launcher's side of the standby: restart, failure, and the second attempt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from elasticjob_launcher.settings import Limits
from elasticjob_launcher.wire import Prepare
from elasticjob_launcher.zygote import manager as standbys
from elasticjob_launcher.zygote.manager import (
    MOST_REFUSALS,
    MOST_STARTS,
    REST_SECONDS,
    ZygoteManager,
    wait_seconds,
)


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

    def __init__(
        self, loop: Any, output: Any, wanted: Any, env: Mapping[str, str], keep: Sequence[int],
        on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.says = on_message
        self.dies = on_lost
        Process.made.append(self)

    def send(self, message: dict[str, Any]) -> None:
        self.asked = message

    def end(self) -> None:
        pass


class Output:
    said: list[str] = []  # noqa: RUF012

    def say(self, text: str) -> None:
        Output.said.append(text)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> list[tuple[bool, str]]:
    """Return the states reported by a requested standby."""
    monkeypatch.setattr(standbys, "ZygoteProcess", Process)
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(Output, "said", [])
    found: list[tuple[bool, str]] = []
    zygote = ZygoteManager(
        loop, Output(), {}, (), Limits(), lambda ready, why: found.append((ready, why))  # type: ignore[arg-type]
    )  # fmt: skip
    zygote.prepare(Prepare((sys.executable, "train.py"), {}, (), ""))
    return found


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


def test_recorded_modules_are_preloaded_after_one_of_them_was_refused(
    settled: list[tuple[bool, str]],
) -> None:
    Process.made[-1].says({"is": "ready"})
    Process.made[-1].says({"is": "recorded", "names": ["sympy", "pandas", "torch._dynamo"]})
    refused = {"pandas": "it starts threads"}
    Process.made[-1].says({"is": "unfit", "refused": refused, "reason": ""})
    assert len(Process.made) == 2
    assert Process.made[-1].asked["learned"] == ["sympy", "pandas", "torch._dynamo"]
    assert Process.made[-1].asked["excluded"] == ["pandas"]
    assert settled == [(True, "")]


def test_recorded_module_at_whose_import_the_zygote_dies_is_excluded(
    settled: list[tuple[bool, str]],
) -> None:
    Process.made[-1].says({"is": "ready"})
    Process.made[-1].says({"is": "recorded", "names": ["good", "bad"]})
    Process.made[-1].dies("the standby ended with signal 11")  # at rest: no module is to blame
    assert Process.made[-1].asked["excluded"] == []
    for name in ("good", "bad"):
        Process.made[-1].says({"is": "importing", "module": name})
    Process.made[-1].dies("the standby ended with signal 11")
    assert Process.made[-1].asked["excluded"] == ["bad"]
    assert Output.said == ["not preloaded: bad: the standby ended with signal 11"]


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
        (0.0, 30.0, 5.0),
        (8.0, 0.0, 8.0),
        (8.0, 3.0, 5.0),
        (8.0, 7.0, 2.0),
        (8.0, 30.0, 2.0),
        (1.0, 0.0, 2.0),
        (45.0, 0.0, 20.0),
        (45.0, 30.0, 15.0),
    ],
)
def test_workers_wait_at_most_the_rest_of_the_last_load(
    load_seconds: float, elapsed_seconds: float, expected: float
) -> None:
    assert wait_seconds(load_seconds, elapsed_seconds) == expected
