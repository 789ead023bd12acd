"""Training progress shown for a job, from the files that its workers leave."""

from __future__ import annotations

import json
import os
from pathlib import Path

from elasticjob_cli.local.display import read_progress


def tell(logs: Path, pod: str, number: int, at: int, **told: float) -> None:
    """Write the progress of a pod's rank 0 in a round; without values, only its folder."""
    folder = logs / pod / "workers" / "uid" / f"round_{number}" / "0"
    folder.mkdir(parents=True)
    if told:
        (folder / "progress").write_text(json.dumps(told))
        os.utime(folder / "progress", (at, at))


def test_newest_progress_of_latest_round_counts(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == {}
    tell(tmp_path, "job-0", 1, at=100, step=5, loss=0.51234567)
    tell(tmp_path, "job-1", 1, at=101, step=6)
    assert read_progress(tmp_path) == {"step": 5, "loss": 0.5123}
    tell(tmp_path, "job-1", 2, at=102, step=9, loss=0.25)
    assert read_progress(tmp_path) == {"step": 9, "loss": 0.25}


def test_new_round_ignores_older_progress_of_removed_pod(
    tmp_path: Path,
) -> None:
    tell(tmp_path, "gone-1", 7, at=100, step=60, loss=0.5)
    tell(tmp_path, "job-0", 9, at=130, step=90, loss=0.25)
    tell(tmp_path, "job-0", 10, at=131)
    assert read_progress(tmp_path) == {"step": 90, "loss": 0.25}
