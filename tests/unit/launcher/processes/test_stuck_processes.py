"""Processes after SIGKILL: planted entries of /proc, and a real process that runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticjob_launcher.processes.process_info import (
    PF_EXITING,
    is_beyond_return,
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
    ],
)
def test_process_runs_no_more_only_if_every_thread_is_ended_or_killed_in_its_wait(
    tmp_path: Path, thread: dict[str, int | str], beyond: bool
) -> None:
    plant(tmp_path, 7)
    assert is_beyond_return(7, tmp_path)
    plant(tmp_path, 8, **thread)  # type: ignore[arg-type]
    assert is_beyond_return(7, tmp_path) is beyond


def test_unreadable_process_may_still_run(tmp_path: Path) -> None:
    plant(tmp_path, 7)
    (tmp_path / "7/task/7/status").write_text("Name:\ta\n")
    assert not is_beyond_return(7, tmp_path)
    (tmp_path / "7/task/7/stat").write_text("")
    assert not is_beyond_return(7, tmp_path)
    (tmp_path / "7/task/7/stat").unlink()
    assert not is_beyond_return(7, tmp_path), "a thread went, the process did not"


def test_reaped_process_runs_no_more(tmp_path: Path) -> None:
    assert is_beyond_return(7, tmp_path)


def test_running_process_is_not_given_up() -> None:
    assert not is_beyond_return(os.getpid())


def test_description_names_processes_and_place(tmp_path: Path) -> None:
    plant(tmp_path, 7, state="Z", wchan="0")
    plant(tmp_path, 8)
    plant(tmp_path, 9, pid=9, wchan="0")
    assert kernel_wait(7, tmp_path) == "percpu_rwsem_wait"
    assert stuck_text([9, 7], 10, tmp_path) == (
        "process 7 and 1 more of the workers did not end within 10 s after SIGKILL: it is in an "
        "uninterruptible wait in the kernel (percpu_rwsem_wait), as for a disk that does not answer"
    )
    assert "kernel, as for" in stuck_text([9], 10, tmp_path)
