"""Import records of workers, and the launcher's memory of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elasticjob_agent.core.worker_environment import (
    Run,
    WorkerFiles,
    shared_environment,
    worker_environment,
)
from elasticjob_launcher.zygote.preload_cache import DISK_SECONDS, PreloadCache
from elasticjob_launcher.zygote.worker_environment import shared_variables, with_changes
from tests.unit.agent.builders import ME, roster
from tests.unit.full_disk import room


def test_worker_environment_is_rank_specific_or_shared() -> None:
    sealed = roster(1)
    assignment = sealed.assignment(ME)
    assert assignment is not None
    env = worker_environment(sealed, assignment, 0, Run("job", 3), WorkerFiles("/e", "/p"), ())
    assert shared_variables(env) == shared_environment(assignment.slots, (), False)


def test_environment_changes_of_imports_keep_rank_variables() -> None:
    env = {"RANK": "3", "CUDA_VISIBLE_DEVICES": "1", "MODE": "job", "TAKEN": "1"}
    here = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "", "MODE": "package", "LC_CTYPE": "C.UTF-8"}
    assert with_changes(env, here) == {
        "RANK": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "MODE": "package",
        "LC_CTYPE": "C.UTF-8",
    }


def test_preload_cache_is_kept_for_the_same_program_only(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    first = PreloadCache(path)
    first.read("train.py")
    first.extend(["torch", "numpy"])
    first.extend(["numpy", "yaml"])
    first.exclude(["yaml"])
    again = PreloadCache(path)
    again.read("train.py")
    assert (again.modules, again.excluded) == (["torch", "numpy", "yaml"], {"yaml"})
    other = PreloadCache(path)
    other.read("other.py")
    assert (other.modules, other.excluded) == ([], set())


def test_full_disk_keeps_old_preload_cache(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    memory = PreloadCache(path)
    memory.extend(["torch"])
    before = path.read_bytes()
    with room(len(before)):
        memory.extend(["numpy"])
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


def test_unreadable_or_unwritable_preload_cache_is_ignored(tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"program": "p", "learned": 3}', b"\xff"):
        path = tmp_path / "preload.json"
        path.write_bytes(content)
        memory = PreloadCache(path)
        memory.read("p")
        assert memory.modules == []
    memory = PreloadCache(tmp_path / "absent" / "preload.json")
    memory.extend(["torch"])
    assert memory.modules == ["torch"]
    assert not (tmp_path / "absent").exists()


@pytest.mark.timeout(60)
def test_hanging_disk_delays_the_launcher_once_and_briefly(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    os.mkfifo(path)  # opening it blocks, as a call to a dead network disk does
    memory = PreloadCache(path)
    began = time.monotonic()
    memory.read("train.py")
    first = time.monotonic() - began
    assert first >= DISK_SECONDS
    for name in ("torch", "numpy", "yaml"):  # left out: the first access has not ended
        memory.extend([name])
        memory.exclude([name])
    assert time.monotonic() - began - first < DISK_SECONDS
    assert memory.modules == ["torch", "numpy", "yaml"]
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # ends the read
    while not path.is_file():  # later writes are not left out
        memory.exclude(["scipy"])
        time.sleep(0.01)
    again = PreloadCache(path)
    again.read("train.py")
    assert again.modules == ["torch", "numpy", "yaml"]
