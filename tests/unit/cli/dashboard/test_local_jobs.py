"""Local jobs in the dashboard: the end of the logs on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_cli.dashboard.local_jobs import LocalJobs
from elasticjob_cli.dashboard.sources import BYTES_PER_POD, PODS_OF_JOB
from elasticjob_cli.local.job_store import JobFolder, write_json
from elasticjob_cli.log_lines import LogOptions


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the logs of a job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = JobFolder("default", "demo")
    folder.acquire()
    write_json(folder.status_file, {"metadata": {"name": "demo"}})
    folder.release()
    return folder.logs


def write(logs: Path, pod: str, text: str, older: str | None = None) -> None:
    (logs / pod).mkdir(parents=True)
    (logs / pod / "trainer.log").write_text(text)
    if older is not None:
        (logs / pod / "trainer.log.1").write_text(older)


def texts(tail: int | None = None) -> list[str]:
    found = LocalJobs().logs("default", "demo", LogOptions(tail=tail))
    return [line.text for line in found.lines]


@pytest.mark.parametrize("at", range(0, 13, 3))
def test_log_goes_on_from_the_rotated_file(logs: Path, at: int) -> None:
    whole = "one\ntwo\nthree\n"
    write(logs, "demo-0", whole[at:], older=whole[:at])
    assert texts(tail=9) == ["one", "two", "three"]


def test_end_of_both_files_has_a_maximum_and_begins_with_a_whole_line(logs: Path) -> None:
    lines = [f"{at:019}" for at in range(20_000)]
    whole = "".join(f"{line}\n" for line in lines)
    write(logs, "demo-0", whole[-100_003:], older=whole[:-100_003])
    kept = BYTES_PER_POD // 20
    assert texts() == lines[-kept:]


def test_large_log_is_not_mixed_with_the_rotated_file(logs: Path) -> None:
    write(logs, "demo-0", "x\n" * BYTES_PER_POD, older="old\n")
    assert set(texts()) == {"x"}


def test_file_that_is_rotated_during_the_read_is_shown_once(logs: Path) -> None:
    write(logs, "demo-0", "one\n")
    (logs / "demo-0" / "trainer.log.1").hardlink_to(logs / "demo-0" / "trainer.log")
    assert texts() == ["one"]


def test_page_of_a_job_has_fewer_pods(logs: Path) -> None:
    for at in range(PODS_OF_JOB + 1):
        write(logs, f"demo-{at}", "x\n")
    jobs = LocalJobs()
    assert jobs.logs("default", "demo", LogOptions()).note == ""
    document = jobs.details("default", "demo").document
    found = jobs.logs("default", "demo", LogOptions(), document)
    assert found.note == f"only the first {PODS_OF_JOB} of {PODS_OF_JOB + 1} pods"
