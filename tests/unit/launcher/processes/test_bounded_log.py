"""Size limits of log files, for any input."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_launcher.processes.output import BoundedLog


def write_all(directory: Path, max_bytes: int, pieces: list[bytes]) -> dict[str, bytes]:
    log = BoundedLog(directory / "stdout.log", max_bytes)
    for piece in pieces:
        log.write(piece)
    log.close()
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 60), st.lists(st.text("ab\n", max_size=40).map(str.encode)))
def test_log_keeps_its_size_bound_and_both_ends(max_bytes: int, pieces: list[bytes]) -> None:
    with TemporaryDirectory() as directory:
        logs = write_all(Path(directory), max_bytes, pieces)
    stream = b"".join(pieces)
    newest = logs.get("stdout.log.1", b"") + logs.get("stdout.log", b"")
    assert sum(map(len, logs.values())) <= max_bytes
    assert stream.startswith(logs.get("stdout.log.head", b""))
    assert stream.endswith(newest)
    if len(stream) <= max_bytes // 3:
        assert logs == ({"stdout.log": stream} if pieces else {})


def test_files_are_cut_at_line_ends(tmp_path: Path) -> None:
    logs = write_all(tmp_path, 30, [b"1234567\n", b"abc\ndef\n", b"x\n"])
    assert logs == {"stdout.log.head": b"1234567\n", "stdout.log": b"abc\ndef\nx\n"}


def test_existing_log_is_continued(tmp_path: Path) -> None:
    write_all(tmp_path, 300, [b"before\n"])
    assert write_all(tmp_path, 300, [b"after\n"]) == {"stdout.log": b"before\nafter\n"}


def test_file_exists_before_first_write(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "deep" / "stdout.log", 300)
    log.write(b"")
    log.close()
    assert (tmp_path / "deep" / "stdout.log").read_bytes() == b""
