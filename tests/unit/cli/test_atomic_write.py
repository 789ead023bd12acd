"""Atomic writes of a user's file: the whole new content or the old one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml

from bench.results import keep
from elasticjob_cli import output as wholefile
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.output import replace_file
from tests.unit.cli.commands.test_convert import convert, job
from tests.unit.full_disk import room


def test_failed_write_of_new_file_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), room(100):
        replace_file(tmp_path / "new", b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_of_existing_file_keeps_old_content(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(b"old")
    with pytest.raises(OSError, match="File too large"), room(100):
        replace_file(old, b"x" * 1000)
    assert (old.read_bytes(), [*tmp_path.iterdir()]) == (b"old", [old])


def test_replaced_file_keeps_mode_and_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    old, link = tmp_path / "there" / "old", tmp_path / "link"
    old.write_bytes(b"old")
    old.chmod(0o640)
    link.symlink_to(old)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert (old.read_bytes(), old.stat().st_mode & 0o777) == (b"new", 0o640)


def test_new_file_has_default_mode(tmp_path: Path) -> None:
    (tmp_path / "any").write_bytes(b"")
    replace_file(tmp_path / "new", b"new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_pipe_receives_the_content(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_file(tmp_path / "pipe", b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_file_that_cannot_be_replaced_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is mounted alone into a container cannot be replaced."""

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(wholefile, "replace_atomically", busy)
    mounted = tmp_path / "mounted"
    mounted.write_bytes(b"old")
    replace_file(mounted, b"new")
    assert mounted.read_bytes() == b"new"
    with pytest.raises(OSError, match="File too large"), room(100):
        replace_file(mounted, b"x" * 1000)
    assert mounted.read_bytes() == b"new"
    with pytest.raises(OSError, match="busy"):
        replace_file(tmp_path / "missing", b"new")


def test_unwritable_conversion_keeps_existing_file(tmp_path: Path) -> None:
    source, output = tmp_path / "in.yaml", tmp_path / "out.yaml"
    source.write_text(yaml.safe_dump(job()))
    output.write_text("mine\n")
    with room(100):
        refused = convert(source, "-o", output)
    assert isinstance(refused.exception, CommandError)
    assert str(refused.exception) == f"{output} cannot be written: File too large"
    assert output.read_text() == "mine\n"
    assert sorted(tmp_path.iterdir()) == [source, output]


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    source, output = tmp_path / "in.yaml", tmp_path / "out.yaml"
    source.write_text(yaml.safe_dump(job()))
    refused = convert(source, "-o", output, "--autoscaler", tmp_path / "." / "out.yaml")
    assert isinstance(refused.exception, BadInput)
    assert "must be two files" in str(refused.exception)
    assert not output.exists()


def test_results_are_printed_when_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "crowd.json"
    with pytest.raises(SystemExit) as ended, room(10):
        keep(path, {"benchmark": "crowd"})
    assert ended.value.code == (
        f"{path} cannot be written: File too large; its content is printed above"
    )
    assert capsys.readouterr().out == '{\n  "benchmark": "crowd"\n}\n\n'
    assert not path.exists()
    keep(path, {"benchmark": "crowd"})
    assert path.read_text() == '{\n  "benchmark": "crowd"\n}\n'
