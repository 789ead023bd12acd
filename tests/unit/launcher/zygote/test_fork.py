"""Workers forked by the standby: late births are refused, timely ones are known."""

from __future__ import annotations

import mmap
import os
import socket
import time
from pathlib import Path

import pytest

from elasticjob_launcher.zygote.fork_requests import FORK_SECONDS, ForkedWorker, receive_worker
from elasticjob_launcher.zygote.fork_safety import memory_maps


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_pid_sent_before_timeout_is_read_after_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    told, tell = ends
    with told, tell:
        tell.send(b"4242 ")
        found = receive_worker(told, time.monotonic() - 1.0)
        assert isinstance(found, ForkedWorker)
        assert found.pid == 4242


def test_pid_after_timeout_cannot_be_sent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    told, tell = ends
    with told, tell:
        found = receive_worker(told, time.monotonic())
        assert found == f"the standby did not fork within {FORK_SECONDS:g} s"
        # From that moment on, not only after the launcher has closed its end.
        with pytest.raises(BrokenPipeError):
            tell.send(b"4242 ")


def test_failed_fork_reports_its_reason(ends: tuple[socket.socket, socket.socket]) -> None:
    told, tell = ends
    with told:
        with tell:
            tell.send(b"17 torch reports a bad fork")
        assert receive_worker(told, time.monotonic() + 60.0) == "torch reports a bad fork"
        assert receive_worker(told, time.monotonic() + 60.0) == "the standby could not fork"


def test_mapped_files_may_have_any_name(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/libopenblas-\xff\xc2\x85.so"
    with open(name, "w+b") as file:  # noqa: PTH123
        file.write(b"text")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert any(line.endswith(os.fsdecode(name)) for line in memory_maps())
    assert not any(line.endswith(os.fsdecode(name)) for line in memory_maps())
