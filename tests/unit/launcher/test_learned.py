"""Import records of workers, and the launcher's memory of them."""

from __future__ import annotations

from pathlib import Path

from elasticjob_agent.core.ranks import Run, WorkerFiles, shared_environment, worker_environment
from elasticjob_agent.launcher.learned import Learned
from elasticjob_agent.launcher.ranks import shared, with_changes
from tests.unit.agent.builders import ME, roster
from tests.unit.disk import room


def test_all_that_the_agent_gives_a_worker_is_a_rank_or_the_same_for_all() -> None:
    sealed = roster(1)
    seat = sealed.seat(ME)
    assert seat is not None
    env = worker_environment(sealed, seat, 0, Run("job", 3), WorkerFiles("/e", "/p"), ())
    assert shared(env) == shared_environment(seat.slots, (), False)


def test_imports_change_the_environment_but_not_who_a_worker_is() -> None:
    env = {"RANK": "3", "CUDA_VISIBLE_DEVICES": "1", "MODE": "job", "TAKEN": "1"}
    here = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "", "MODE": "package", "LC_CTYPE": "C.UTF-8"}
    assert with_changes(env, here) == {
        "RANK": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "MODE": "package",
        "LC_CTYPE": "C.UTF-8",
    }


def test_memory_is_kept_for_the_same_program_alone(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    first = Learned(path)
    first.read("train.py")
    first.learn(["torch", "numpy"])
    first.learn(["numpy", "yaml"])
    first.exclude(["yaml"])
    again = Learned(path)
    again.read("train.py")
    assert (again.learned, again.excluded) == (["torch", "numpy", "yaml"], {"yaml"})
    other = Learned(path)
    other.read("other.py")
    assert (other.learned, other.excluded) == ([], set())


def test_a_disk_that_fills_up_leaves_the_old_memory(tmp_path: Path) -> None:
    path = tmp_path / "preload.json"
    memory = Learned(path)
    memory.learn(["torch"])
    before = path.read_bytes()
    with room(len(before)):
        memory.learn(["numpy"])
    assert (path.read_bytes(), [*tmp_path.iterdir()]) == (before, [path])


def test_a_memory_that_cannot_be_read_or_written_costs_nothing(tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"program": "p", "learned": 3}', b"\xff"):
        path = tmp_path / "preload.json"
        path.write_bytes(content)
        memory = Learned(path)
        memory.read("p")
        assert memory.learned == []
    memory = Learned(tmp_path / "absent" / "preload.json")
    memory.learn(["torch"])
    assert memory.learned == ["torch"]
    assert not (tmp_path / "absent").exists()
