"""Processes after SIGKILL: planted entries of /proc, and a real process that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticjob_launcher.processes.process_info import group_has_only_zombies, has_handler
from elasticjob_launcher.processes.stuck_processes import (
    PF_EXITING,
    StuckWatch,
    is_stuck_in_kernel,
    kernel_wait,
    stuck_text,
)

NONE = 0
KILLED = 1 << 8
TERMINATED = 1 << 14


def plant(
    proc: Path,
    tid: int,
    state: str = "D",
    own: int = KILLED,
    shared: int = KILLED,
    flags: int = 0x400000,
    wchan: str = "percpu_rwsem_wait",
    pid: int = 7,
) -> None:
    """Write the entry of a thread of process 7."""
    thread = proc / str(pid) / "task" / str(tid)
    thread.mkdir(parents=True)
    (thread / "stat").write_text(f"{tid} (a ) D b) {state} 1 7 7 0 -1 {flags} 0 0")
    (thread / "status").write_text(
        f"Name:\ta\nState:\t{state}\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t0\n"
    )
    (thread / "wchan").write_text(wchan)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("SigIgn:\t0\nSigCgt:\t0000000000004000\n", True),
        ("SigIgn:\t4000\nSigCgt:\t0000000000000000\n", False),
        ("Name:\ta\nState:\tS\n", False),
        ("SigCgt:\t", False),
        ("SigCgt:\tnone\n", False),
        (None, False),
    ],
)
def test_handler_is_read_from_the_status_if_that_has_masks(
    tmp_path: Path, status: str | None, expected: bool
) -> None:
    (tmp_path / "7").mkdir()
    if status is not None:
        (tmp_path / "7" / "status").write_text(status)
    assert has_handler(7, signal.SIGTERM, tmp_path) == expected


@pytest.mark.parametrize(
    ("thread", "beyond"),
    [
        ({}, True),
        ({"own": NONE}, True),  # the kernel has taken it, and the process keeps its mark
        ({"shared": NONE}, True),
        ({"own": NONE, "shared": NONE}, False),
        ({"own": TERMINATED, "shared": TERMINATED}, False),
        ({"state": "S"}, False),
        ({"state": "R"}, False),
        ({"state": "T"}, False),
        ({"state": "t"}, False),
        ({"state": "Z", "own": NONE, "shared": NONE}, True),
        ({"state": "X", "own": NONE, "shared": NONE}, True),
        ({"state": "R", "flags": PF_EXITING | 0x400000}, False),  # it makes progress
        ({"state": "D", "own": NONE, "shared": NONE, "flags": PF_EXITING | 0x400000}, True),
        ({"state": "I"}, True),  # it waits for the core file of its process
        ({"state": "I", "own": NONE, "shared": NONE}, False),
    ],
)
def test_process_runs_no_more_only_if_every_thread_is_ended_or_killed_in_its_wait(
    tmp_path: Path, thread: dict[str, int | str], beyond: bool
) -> None:
    plant(tmp_path, 7)
    assert is_stuck_in_kernel(7, tmp_path)
    plant(tmp_path, 8, **thread)  # type: ignore[arg-type]
    assert is_stuck_in_kernel(7, tmp_path) is beyond


def test_unreadable_process_may_still_run(tmp_path: Path) -> None:
    plant(tmp_path, 7)
    (tmp_path / "7/task/7/status").write_text("Name:\ta\n")
    assert not is_stuck_in_kernel(7, tmp_path)
    (tmp_path / "7/task/7/stat").write_text("")
    assert not is_stuck_in_kernel(7, tmp_path)
    (tmp_path / "7/task/7/stat").unlink()
    assert not is_stuck_in_kernel(7, tmp_path), "a thread went, the process did not"


def test_reaped_process_runs_no_more(tmp_path: Path) -> None:
    assert is_stuck_in_kernel(7, tmp_path)


def test_running_process_is_not_given_up() -> None:
    assert not is_stuck_in_kernel(os.getpid())


def test_description_names_processes_and_place(tmp_path: Path) -> None:
    plant(tmp_path, 5, state="Z", wchan="0", pid=5)  # a zombie whose parent is process 7
    plant(tmp_path, 7, state="Z", wchan="0")
    plant(tmp_path, 8)
    plant(tmp_path, 9, pid=9, wchan="0")
    assert kernel_wait(7, tmp_path) == "percpu_rwsem_wait"
    assert stuck_text([9, 7, 5], 10, tmp_path) == (
        "process 7 and 2 more of the workers did not end within 10 s after SIGKILL: it is in an "
        "uninterruptible wait in the kernel (percpu_rwsem_wait), as for a disk that does not answer"
    )
    assert "kernel, as for" in stuck_text([9], 10, tmp_path)


class Clock:
    """Clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pause_of_launcher_counts_little(tmp_path: Path) -> None:
    plant(tmp_path, 7)
    clock = Clock()
    watch = StuckWatch(clock, tmp_path)
    clock.now += 60
    assert watch.observe([7]) == 0.0, "it may have begun to wait just now"
    clock.now += 0.2
    assert watch.observe([7]) == pytest.approx(0.2)
    clock.now += 60
    assert watch.observe([7]) == pytest.approx(1.2)


def test_wait_counts_from_the_last_time_that_any_process_could_run(tmp_path: Path) -> None:
    plant(tmp_path, 7)
    plant(tmp_path, 9, pid=9)
    clock = Clock()
    watch = StuckWatch(clock, tmp_path)
    watch.observe([7])
    clock.now += 0.5
    assert watch.observe([7]) == 0.5
    (tmp_path / "9/task/9/stat").write_text("9 (a) R 1 7 7 0 -1 0 0 0")
    clock.now += 0.5
    assert watch.observe([7, 9]) == 0.0
    clock.now += 0.5
    assert watch.observe([7]) == 0.0
    clock.now += 0.5
    assert watch.observe([7]) == 0.5
    assert watch.observe([]) == 0.0


LEADERLESS = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("on", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
"""


def test_process_whose_first_thread_ended_is_no_zombie() -> None:
    command = [sys.executable, "-c", LEADERLESS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 60
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not group_has_only_zombies(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert group_has_only_zombies(process.pid)
    finally:
        process.kill()
        process.communicate()
