"""Command at the lowest priority beside another: its priority, its output, failures of both."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT


def beside(
    tmp_path: Path, nice: str, command: str, before: str | None = None
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "scripts" / "beside.py"), str(tmp_path / "a" / "log")]
    overlapped = [] if before is None else ["--before", "mark", before]
    return subprocess.run(
        [*program, nice, *overlapped, "bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=240,
    )


def test_first_command_has_the_lowest_priority_and_prints_after_the_second(tmp_path: Path) -> None:
    wait = "until [ -e second ]; do sleep 0.05; done"
    ended = beside(tmp_path, f"echo niceness $(nice); {wait}", "echo second; touch second; nice")
    assert ended.returncode == 0
    said = ended.stdout.split("\n")
    assert said[0] == "second"
    assert int(said[1]) < 19
    assert said.index("niceness 19") > said.index("second")


@pytest.mark.parametrize(
    ("nice", "command", "status"),
    [("exit 3", "true", 3), ("false | cat", "true", 1), ("true", "exit 4", 4)],
)
def test_failure_of_either_command_is_the_status(
    tmp_path: Path, nice: str, command: str, status: int
) -> None:
    assert beside(tmp_path, nice, command).returncode == status


def test_session_of_the_first_command_has_the_lowest_priority(tmp_path: Path) -> None:
    file = Path("/proc/self/autogroup")
    shown = "cat /proc/self/autogroup" if file.exists() else "echo /autogroup-0 nice 19"
    ended = beside(tmp_path, shown, "true")
    assert "nice 19" in ended.stdout


def test_failure_of_the_second_command_stops_the_first_and_its_children(tmp_path: Path) -> None:
    nice = "sleep 300 & echo $! > child; wait"
    ended = beside(tmp_path, nice, "until [ -s child ]; do sleep 0.05; done; exit 5")
    assert ended.returncode == 5
    assert "stopped" in ended.stdout
    child = Path("/proc", (tmp_path / "child").read_text().strip())
    deadline = time.monotonic() + 60
    while child.exists() and "Z" not in (child / "stat").read_text().split():
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.05)


def test_command_begins_at_the_mark_and_delays_later_output_of_the_other(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()  # of an earlier run
    wait = "until [ -e began ]; do sleep 0.05; done"
    before = f"echo one; sleep 0.5; [ ! -e began ]; touch mark; {wait}; echo three"
    ended = beside(tmp_path, "echo four", "echo two; touch began", before)
    assert ended.returncode == 0, ended.stdout
    assert [word for word in ended.stdout.split() if word != "echo"] == (
        ["one", "two", "three", "four", "four"]  # the last command's text, and its output
    )


def test_command_begins_at_the_end_of_another_without_a_mark(tmp_path: Path) -> None:
    ended = beside(tmp_path, "true", "echo two", "echo one")
    assert ended.returncode == 0
    assert ended.stdout.startswith("one\ntwo\n")


def test_failure_before_the_mark_keeps_the_command_from_beginning(tmp_path: Path) -> None:
    ended = beside(tmp_path, "true", "touch began", "echo one; exit 3")
    assert ended.returncode == 3
    assert ended.stdout.startswith("one\n")
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize(
    ("before", "command", "status"),
    [("touch mark; exit 3", "true", 3), ("touch mark; echo all", "exit 4", 4)],
)
def test_failure_of_either_overlapped_command_is_the_status(
    tmp_path: Path, before: str, command: str, status: int
) -> None:
    ended = beside(tmp_path, "true", command, before)
    assert ended.returncode == status
    assert "stopped" in ended.stdout
