"""Checkpoint folders of the framework integrations: the newest, and removal of old ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticjob.train import integrations
from elasticjob.train.integrations import newest


def saved(folder: Path, *names: str) -> None:
    """Create checkpoints: files if their name has a suffix, else folders with a file."""
    for name in names:
        path = folder / name
        if path.suffix:
            path.write_text("weights")
        else:
            path.mkdir(parents=True)
            (path / "weights").write_text("weights")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], None),
        (["notes.txt", "runs", "unfinished-300"], None),
        (["checkpoint-50", "checkpoint-100", "checkpoint-9"], "checkpoint-100"),
        (["step=50.ckpt", "step=100.ckpt"], "step=100.ckpt"),
        (["epoch=0-step=50.ckpt", "epoch=1-step=200.ckpt"], "epoch=1-step=200.ckpt"),
        (["step-7", "step_8"], "step_8"),
    ],
)
def test_newest_is_the_checkpoint_of_the_highest_step(
    tmp_path: Path, names: list[str], expected: str | None
) -> None:
    saved(tmp_path, *names)
    assert newest(tmp_path) == (str(tmp_path / expected) if expected else None)


def test_newest_of_a_missing_folder_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") is None


def test_newest_ignores_folders_without_the_file_of_complete_ones(tmp_path: Path) -> None:
    saved(tmp_path, "checkpoint-50", "checkpoint-100")
    (tmp_path / "checkpoint-50" / ".metadata").touch()
    assert newest(tmp_path, ".metadata") == str(tmp_path / "checkpoint-50")


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (0, {"step=50.ckpt", "checkpoint-100", "step=200.ckpt", "notes.txt"}),
        (1, {"step=200.ckpt", "notes.txt"}),
        (2, {"checkpoint-100", "step=200.ckpt", "notes.txt"}),
        (5, {"step=50.ckpt", "checkpoint-100", "step=200.ckpt", "notes.txt"}),
    ],
)
def test_checkpoints_of_the_highest_steps_are_kept_whatever_their_time(
    tmp_path: Path, count: int, kept: set[str]
) -> None:
    saved(tmp_path, "step=200.ckpt", "checkpoint-100", "step=50.ckpt", "notes.txt")
    saved(tmp_path, "unfinished-300", "unfinished-250.ckpt")
    for seconds, name in enumerate(("step=200.ckpt", "checkpoint-100", "step=50.ckpt")):
        os.utime(tmp_path / name, (seconds, seconds))  # a copied folder has other times
    integrations._keep(tmp_path, count)
    assert {path.name for path in tmp_path.iterdir()} == kept
