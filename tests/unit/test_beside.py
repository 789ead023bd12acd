"""Command at the lowest priority beside another: its priority, its output, failures of both."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.paths import ROOT


def beside(tmp_path: Path, nice: str, command: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(ROOT / "scripts" / "beside.py"), str(tmp_path / "a" / "log")]
    return subprocess.run(
        [*program, nice, "bash", "-c", command],
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
