"""Files and folders that are compared around processes that an import starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.effects import child_files
from elasticjob_launcher.zygote.effects.child_files import ChildFiles


def observer() -> ChildFiles:
    return ChildFiles(lambda: "pkg", lambda: 0.0)


def test_entries_of_folders_count_only_if_the_command_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cwd", "home", "tmp", "named"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    files = observer()
    files.started(["tool", f"--out={tmp_path / 'named'}"])
    for name in ("cwd", "home", "tmp", "named"):
        (tmp_path / name / "new").touch()
    files.ended(())
    assert files.found() == [(str(tmp_path / "named" / "new"), "pkg")]


def test_file_of_this_process_does_not_count_through_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files = observer()
    files.started(["tool", str(tmp_path / "link"), str(tmp_path / "real" / "a")])
    for name in ("a", "b", "c"):
        (tmp_path / "real" / name).touch()
    files.ended({str(tmp_path / "link" / "a"), str(tmp_path / "link" / "b"), "sqlite3"})
    assert files.found() == [(str(tmp_path / "real" / "c"), "pkg")]


def test_file_changed_through_a_link_counts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    files = observer()
    files.started(["tool", "link"], tmp_path)
    (tmp_path / "file").write_text("changed")
    files.ended(())
    assert files.found() == [(str(tmp_path / "file"), "pkg")]


def test_entry_older_than_the_process_or_of_another_user_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[str]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        files = observer()
        files.started(["tool", str(place)])
        (place / "new").touch()
        files.ended(())
        return [path for path, _ in files.found()]

    assert len(found()) == 1
    now, user = time.time(), os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + 3600)
        assert found() == []
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert found() == []


def test_entries_of_large_folder_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_files, "MOST_ENTRIES", 2)
    for name in "abc":
        (tmp_path / name).touch()
    files = observer()
    files.started(["tool", str(tmp_path)])
    (tmp_path / "new").touch()
    files.ended(())
    assert files.found() == []


def test_nothing_more_is_compared_once_comparisons_have_taken_too_long(tmp_path: Path) -> None:
    seconds, reads = 0.0, 0

    def clock() -> float:
        nonlocal seconds, reads
        reads += 1
        seconds += 0.15
        return seconds

    files = ChildFiles(lambda: "pkg", clock)
    words = [str(tmp_path / name) for name in "abcd"]
    files.started(words)
    assert reads == 4, "two words"
    files.started(words)
    files.ended(())
    assert reads == 4
    files.clear()
    files.started(words)
    assert reads == 8, "in the next import"


def test_path_is_stamped_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    files = observer()
    files.started(["tool", "file"], tmp_path)
    (tmp_path / "file").write_text("changed by the first process")
    files.started(["tool", "file"], tmp_path)
    files.ended(())
    assert files.found() == [(str(tmp_path / "file"), "pkg")]
