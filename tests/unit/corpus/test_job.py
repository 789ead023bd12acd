"""Runner of a corpus job: its waits end when the job cannot go as planned."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.corpus import job


@pytest.fixture
def begun(tmp_path: Path) -> job._Job:
    """Make a job with the records of two of four workers, and no agents."""
    begun = job._Job(tmp_path)
    begun.part("records").mkdir()
    for rank in range(2):
        for stage in ("imported", "used"):
            (begun.part("records") / f"1-{rank}-{stage}.json").touch()
    return begun


def test_round_after_the_expected_one_ends_the_wait(begun: job._Job) -> None:
    (begun.part("records") / "3-0-imported.json").touch()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"round 3 began .* in round 1"):
        job._all_used(begun, 1)
    assert time.monotonic() - began < job.PATIENCE_SECONDS / 4


def test_wait_ends_with_the_last_worker_of_the_expected_round(
    begun: job._Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="in vain for round 1"):
        job._all_used(begun, 1)
    for rank in range(2, job.NODES * job.SLOTS):
        for stage in ("imported", "used"):
            (begun.part("records") / f"1-{rank}-{stage}.json").touch()
    newest = (begun.part("records") / "1-3-imported.json").stat().st_mtime
    assert job._all_used(begun, 1) == pytest.approx(newest, abs=5)
