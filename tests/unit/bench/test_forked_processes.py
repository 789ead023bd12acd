"""Forked processes, released all at once, that end with their block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.forked import CaseFailed, Send, forked
from bench.processes import alive

PATIENCE_SECONDS = 60.0


def deadline() -> float:
    return time.monotonic() + PATIENCE_SECONDS


def test_processes_wait_for_the_start_signal(tmp_path: Path) -> None:
    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> None:
        send({"ready": index})
        wait_for_start()
        send({"index": index, "at": time.monotonic(), "pid": os.getpid()})

    with forked(3, live, tmp_path / "log") as processes:
        ready = processes.take(3, deadline())
        assert {line["ready"] for line in ready} == {0, 1, 2}
        began = processes.release()
        lines = processes.take(3, deadline())
        assert all(line["at"] >= began for line in lines)
        assert len({line["pid"] for line in lines}) == 3
    assert not [line["pid"] for line in lines if alive(line["pid"])]


def test_error_ends_wait_for_other_processes(tmp_path: Path) -> None:
    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> None:
        if index == 1:
            raise ValueError("no luck")
        wait_for_start()

    with (
        forked(2, live, tmp_path / "log") as processes,
        pytest.raises(CaseFailed, match="ValueError: no luck"),
    ):
        processes.take(2, deadline())


def test_wait_for_silent_process_is_bounded(tmp_path: Path) -> None:
    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> None:
        wait_for_start()

    with (
        forked(1, live, tmp_path / "log") as processes,
        pytest.raises(CaseFailed, match="only 0 of 1"),
    ):
        processes.take(1, time.monotonic())


def test_return_value_of_process_is_kept_until_the_end(tmp_path: Path) -> None:
    class Kept:
        def __init__(self, send: Send) -> None:
            self.send = send

        def __del__(self) -> None:
            self.send({"gone": True})

    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> object:
        send({"done": True})
        return Kept(send)

    with forked(1, live, tmp_path / "log") as processes:
        assert processes.take(1, deadline()) == [{"done": True}]
        with pytest.raises(CaseFailed, match="only 0 of 1"):
            processes.take(1, time.monotonic() + 0.2)
