"""Workers forked by the standby: late births are refused, timely ones are known."""

from __future__ import annotations

import socket
import time

import pytest

from elasticjob_launcher.zygote.fork_requests import FORK_SECONDS, ForkedWorker, receive_worker


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
