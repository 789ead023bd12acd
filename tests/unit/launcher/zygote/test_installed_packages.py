"""Packages of a folder by the RECORD files in it, as `pip install --target` writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticjob_launcher.zygote import preload
from elasticjob_launcher.zygote.preload import recorded_entries


def record(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.dist-info" / "RECORD"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_first_part_of_each_recorded_path_counts(tmp_path: Path) -> None:
    record(
        tmp_path,
        "a-1",
        'pkg/__init__.py,sha256=x,1\npkg/part.py,,\nsingle.py,,\n"quoted,name/x.py",,\n'
        "../../bin/tool,,\n./here.py,,\n/absolute/x.py,,\n\n",
    )
    record(tmp_path, "b-1", "other.so,,\r\n")
    record(tmp_path / "inner", "c-1", "below/x.py,,\n")
    expected = {"pkg", "single.py", "quoted,name", "other.so"}
    assert recorded_entries(str(tmp_path)) == expected


def test_pipe_in_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    path = record(tmp_path, "a-1", "")
    path.unlink()
    os.mkfifo(path)
    record(tmp_path, "b-1", "pkg/x.py,,\n")
    assert recorded_entries(str(tmp_path)) == {"pkg"}


def test_folder_that_cannot_be_read_has_no_packages(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"")
    for folder in ("missing", "a.zip"):
        assert not recorded_entries(str(tmp_path / folder))


def test_folder_and_record_are_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "long", "a-1", "first,,\n" + "x" * 100 + ",,\nlast,,\n")
    monkeypatch.setattr(preload, "MAX_RECORD_BYTES", 50)
    assert "last" not in recorded_entries(str(tmp_path / "long"))
    for name in ("a", "b", "c"):
        record(tmp_path / "many", f"{name}-1", f"{name}/x.py,,\n")
    monkeypatch.setattr(preload, "MAX_ENTRIES", 1)
    assert len(recorded_entries(str(tmp_path / "many"))) == 1
