"""Following of growing files, and the search for a rank's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.logs import MISSING, Tail, find_worker, pods_with_output, worker_logs


def assignment(pod: str, base: int, slots: int = 2) -> dict[str, Any]:
    return {"pod": pod, "baseRank": base, "slots": slots, "groupRank": base // slots}


ROUNDS = [
    {"round": 1, "worldSize": 4, "seats": [assignment("j-0", 0), assignment("j-1", 2)]},
    {"round": 2, "worldSize": 2, "seats": [assignment("j-1", 0)]},
]


def test_tail_returns_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []  # not there yet
    path.write_text("one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("a") as file:
        file.write("o\nthree")
    assert list(tail.lines()) == ["two"]
    assert list(tail.remainder()) == ["three"]
    assert list(tail.remainder()) == []


def test_rotated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["old"]
    path.replace(tmp_path / "log.1")
    path.write_text("new line\n")
    assert list(tail.lines()) == ["new line"]
    path.write_text("cut\n")
    assert list(tail.lines()) == ["cut"]


def test_rotated_content_is_read_first(tmp_path: Path) -> None:
    """A worker's log keeps its head, a container's log its tail; both may have lost lines."""
    path = tmp_path / "log"
    (tmp_path / "log.1").write_text("b\nha")
    path.write_text("lf\nc\n")
    assert list(Tail(path).lines()) == [MISSING, "b", "half", "c"]
    (tmp_path / "log.head").write_text("a\n")
    assert list(Tail(path).lines()) == ["a", MISSING, "b", "half", "c"]
    (tmp_path / "log.1").unlink()
    assert list(Tail(path).lines()) == ["a", "lf", "c"], "the second file follows the first"


@pytest.mark.parametrize("kept", ["log.1", "log.head"])
def test_lines_written_just_before_rotation_are_not_missed(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one"]
    with path.open("a") as file:
        file.write("two\nthr")
    path.replace(tmp_path / kept)
    path.write_text("ee\n")
    assert list(tail.lines()) == ["two", "three"]
    assert list(tail.lines()) == []


def test_lines_lost_between_reads_are_reported(tmp_path: Path) -> None:
    path, older = tmp_path / "log", tmp_path / "log.1"
    older.write_text("zero\n")
    path.write_text("one\n")
    tail = Tail(path)
    assert list(tail.lines()) == [MISSING, "zero", "one"]
    for line in ("two", "three", "four"):
        path.replace(older)
        path.write_text(f"{line}\n")
    assert list(tail.lines()) == [MISSING, "three", "four"]


@pytest.mark.parametrize(
    ("rank", "number", "found"),
    [
        (0, None, ("j-1", 2, 0)),
        (3, None, ("j-1", 1, 1)),  # the last round that had this rank
        (1, 1, ("j-0", 1, 1)),
    ],
)
def test_pod_of_a_rank(rank: int, number: int | None, found: tuple[str, int, int]) -> None:
    place = find_worker(ROUNDS, rank, number)
    assert (place["pod"], place["round"], place["localRank"]) == found


@pytest.mark.parametrize(
    ("rank", "number", "message"),
    [
        (9, None, "there is no rank 9; ranks are 0 to 3"),
        (2, 2, "there is no rank 2; ranks are 0 to 1"),
        (0, 5, "there is no round 5; rounds: 1, 2"),
    ],
)
def test_unknown_rank_or_round(rank: int, number: int | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_worker(ROUNDS, rank, number)


def test_no_files_before_first_round(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the job has not had a round"):
        find_worker([], 0, None)


def test_files_of_pods_and_workers(tmp_path: Path) -> None:
    for pod in ("j-10", "j-2"):
        (tmp_path / pod).mkdir()
        (tmp_path / pod / "trainer.log").touch()
    assert pods_with_output(tmp_path) == ["j-2", "j-10"]
    folder = tmp_path / "j-2" / "workers" / "uid" / "round_3" / "1"
    folder.mkdir(parents=True)
    out, err = worker_logs(tmp_path, {"pod": "j-2", "round": 3, "localRank": 1})
    assert (out, err) == (folder / "stdout.log", folder / "stderr.log")
