"""Temporary folders: only those of dead processes are removed, and no stranger's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_agent.tempdirs import NAMED_SECONDS, TempDir

HOLDER = """
import sys
from elasticjob_agent.tempdirs import TempDir
folder = TempDir("test")
(folder.path / "round_1").mkdir()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that has a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_folder_is_removed_on_close(tmp_path: Path) -> None:
    folder = TempDir("test")
    (folder.path / "file").touch()
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_killed_process_is_removed_by_a_later_process(
    tmp_path: Path, holder: tuple[subprocess.Popen[str], Path]
) -> None:
    process, left = holder
    living = TempDir("test")
    assert left.exists(), "its process lives"
    process.kill()
    process.wait()
    assert left.exists()
    third = TempDir("other")
    assert sorted(tmp_path.iterdir()) == sorted([living.path, third.path])
    living.close()
    third.close()


def test_unlocked_folder_of_killed_process_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, used, new = (tmp_path / f"elasticjob-new-{name}" for name in ("old", "used", "new"))
    for folder in (old, used, new):
        folder.mkdir()
    (used / "round_1").mkdir()  # as on a file system without locks
    long_ago = time.time() - NAMED_SECONDS - 60
    for folder in (old, used):
        os.utime(folder, (long_ago, long_ago))
    TempDir("test").close()
    assert sorted(tmp_path.iterdir()) == sorted([new, used])


def test_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, us = tmp_path / "elasticjob-agent-theirs", os.geteuid()
    theirs.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: us + 1)
        TempDir("test").close()
    assert theirs.exists()
    TempDir("test").close()
    assert not theirs.exists()


def test_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "elasticjob-agent-link"
    (elsewhere / "kept").mkdir(parents=True)
    link.symlink_to(elsewhere)
    TempDir("test").close()
    assert (elsewhere / "kept").exists()
    assert link.is_symlink()
