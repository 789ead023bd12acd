"""Time limit of a test that has failed already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

FAILS = """
import time
import pytest

class Slow(Exception):
    def __str__(self):
        time.sleep(1.5)
        return "the failure itself"

@pytest.mark.timeout(1)
def test_fails():
    raise Slow

def test_next():
    pass
"""


def test_time_limit_does_not_end_the_worker_while_a_failure_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "test_slow_report.py"
    path.write_text(FAILS)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null")
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "the failure itself" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


LOGS = """
import os

def test_fails(tmp_path):
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "gone.log").symlink_to("nowhere")
    (tmp_path / "some.log").write_text("the end of a log")
    raise ValueError
"""


def test_report_of_a_failure_has_its_logs_and_no_other_files(tmp_path: Path) -> None:
    path = tmp_path / "test_logs.py"
    path.write_text(LOGS)
    options = ("-p", "tests.integration.conftest", "-p", "no:cacheprovider", "-c", "/dev/null")
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert "the end of a log" in done.stdout
