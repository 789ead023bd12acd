"""Log folders, error files, ports and the termination message."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elasticjob_agent.agent import PortHolder
from elasticjob_agent.main import TERMINATION_BYTES, clip_message, write_termination_message
from elasticjob_agent.settings import LogSettings
from elasticjob_agent.worker_files import MAX_ERROR_BYTES, RunLogs, read_error_file

# -- logs ---------------------------------------------------------------------------


def test_each_round_has_separate_log_folders(tmp_path: Path) -> None:
    logs = RunLogs(LogSettings(tmp_path / "digits"))
    logs.prepare(3, slots=2, base_rank=4)
    assert (tmp_path / "digits/round_3/1").is_dir()
    assert logs.error_file(3, 1) == tmp_path / "digits/round_3/1/error.json"
    assert logs.base_rank(3) == 4
    assert logs.base_rank(4) is None


def test_oldest_rounds_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    logs = RunLogs(LogSettings(tmp_path, keep_rounds=3))
    (tmp_path / "round_trip").mkdir()
    for number in (2, 8, 9, 10, 11):
        logs.prepare(number, slots=1, base_rank=0)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"round_9", "round_10", "round_11", "round_trip"}


def test_error_file_of_earlier_run_is_removed(tmp_path: Path) -> None:
    logs = RunLogs(LogSettings(tmp_path))
    logs.prepare(1, slots=1, base_rank=0)
    (tmp_path / "round_1/0/error.json").write_text("old")
    assert logs.reports(1, 1) == {0: b"old"}
    logs.prepare(1, slots=1, base_rank=0)
    assert logs.reports(1, 1) == {}


def test_workers_under_another_uid_can_write_logs(tmp_path: Path) -> None:
    RunLogs(LogSettings(tmp_path / "run", shared=True)).prepare(1, slots=1, base_rank=0)
    assert (tmp_path / "run/round_1/0").stat().st_mode & 0o777 == 0o777


def test_no_log_folder_keeps_no_logs() -> None:
    logs = RunLogs(LogSettings(None))
    logs.prepare(1, slots=1, base_rank=0)
    assert logs.worker(1, 0) is None
    assert logs.error_file(1, 0) is None
    assert logs.reports(1, 1) == {}
    assert logs.base_rank(1) is None


# -- error files --------------------------------------------------------------------


def test_error_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(b"{}")
    assert read_error_file(path) == b"{}"


@pytest.mark.timeout(60)
def test_invalid_error_file_is_ignored(tmp_path: Path) -> None:
    huge, pipe, link = tmp_path / "huge", tmp_path / "pipe", tmp_path / "link"
    with huge.open("wb") as file:
        file.truncate(MAX_ERROR_BYTES + 1)
    os.mkfifo(pipe)
    link.symlink_to("/etc/passwd")
    (tmp_path / "empty").touch()
    for path in (huge, pipe, link, tmp_path / "empty", tmp_path, tmp_path / "missing"):
        assert read_error_file(path) is None


# -- ports --------------------------------------------------------------------------


def test_held_port_refuses_connections_and_can_be_rebound() -> None:
    ports = PortHolder("127.0.0.1")
    port = ports.hold()
    with socket.socket() as caller:
        assert caller.connect_ex(("127.0.0.1", port)) != 0
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
    ports.close()


def test_current_and_next_port_are_held() -> None:
    ports = PortHolder("127.0.0.1")
    first, second, third = ports.hold(), ports.hold(), ports.hold()
    assert len({first, second, third}) == 3
    for port, held in ((first, False), (second, True), (third, True)):
        with socket.socket() as other:
            busy = other.connect_ex(("127.0.0.1", port)) != 0
            assert busy
        with socket.socket() as other:
            try:
                other.bind(("", port))
                free = True
            except OSError:
                free = False
        assert free is not held
    ports.close()


# -- the termination message --------------------------------------------------------


def test_short_termination_message_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert write_termination_message(path, "job digits succeeded") is None
    assert path.read_text() == "job digits succeeded"


def test_long_termination_message_keeps_both_ends() -> None:
    message = "job digits failed\n" + "ü" * 9000 + "\nValueError: boom"
    text = clip_message(message)
    assert len(text.encode()) <= TERMINATION_BYTES
    assert text.startswith("job digits failed\n")
    assert text.endswith("ValueError: boom")


def test_unwritable_termination_message_does_not_crash(tmp_path: Path) -> None:
    assert isinstance(write_termination_message(tmp_path, "x"), OSError)
    assert write_termination_message(None, "x") is None
