"""Copies of the training state before a stop: order of the requests, handlers, open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticjob_launcher.loop import Loop
from elasticjob_launcher.processes import stop_copies
from elasticjob_launcher.processes.stop_copies import (
    AT_ONCE,
    COPY_AFTER_STEP,
    END_STEP,
    MAGIC,
    REQUEST,
    SOCKET,
    StopCopies,
)

WORKERS = 3
LIMIT_MS = 10_000


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Yield the sockets of workers, which listen."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(WORKERS)]
        for rank, each in enumerate(found):
            each.bind(f"{SOCKET}{rank}")
            each.listen(1)
        yield found


def received(worker: socket.socket) -> tuple[int, int] | None:
    """Return kind and milliseconds of the request that a worker has received; None without one."""
    link, _ = worker.accept()
    with link:
        link.setblocking(False)
        try:
            magic, kind, milliseconds = REQUEST.unpack(link.recv(REQUEST.size))
        except BlockingIOError:
            return None
    assert magic == MAGIC
    return kind, milliseconds


@pytest.mark.parametrize("kind", [AT_ONCE, COPY_AFTER_STEP, END_STEP])
def test_request_follows_its_connection_before_the_next_one(
    workers: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """A worker waits for it from the connection on, and only briefly."""
    found: list[tuple[int, int] | None] = []
    connected = stop_copies._connected

    def recorded(folder: str, rank: int) -> socket.socket | None:
        if rank:
            found.append(received(workers[rank - 1]))
        return connected(folder, rank)

    monkeypatch.setattr(stop_copies, "_connected", recorded)
    monkeypatch.setattr(stop_copies, "has_handler", lambda *_: False)
    copies = StopCopies(Loop(), str(tmp_path), range(WORKERS), lambda: None, kind=kind)
    assert found == [(kind, LIMIT_MS)] * (WORKERS - 1)
    assert copies.pending
    copies.close()


@pytest.mark.parametrize("kind", [AT_ONCE, COPY_AFTER_STEP])
def test_handlers_of_sigterm_are_looked_for_after_all_requests_of_a_copy(
    workers: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    found: list[tuple[int, int] | None] = []

    def has_handler(*_: int) -> bool:
        found.extend(map(received, workers))
        return True

    monkeypatch.setattr(stop_copies, "has_handler", has_handler)
    copies = StopCopies(Loop(), str(tmp_path), range(WORKERS), lambda: None, kind=kind)
    assert found == [(kind, LIMIT_MS)] * WORKERS
    assert copies.handles_sigterm
    assert copies.pending
    copies.close()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
@pytest.mark.parametrize("kind", [AT_ONCE, COPY_AFTER_STEP, END_STEP])
def test_handler_of_the_process_that_listens_is_recorded(
    workers: list[socket.socket], tmp_path: Path, kind: int, handler: Callable[..., None]
) -> None:
    """This process listens itself."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        copies = StopCopies(Loop(), str(tmp_path), range(WORKERS), lambda: None, kind=kind)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert copies.handles_sigterm is callable(handler)
    assert copies.pending is not (kind == END_STEP and callable(handler))
    copies.close()


def test_handler_of_a_later_worker_ends_the_wait_for_the_step_of_all(
    workers: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(stop_copies, "has_handler", lambda *_: next(answers))
    copies = StopCopies(Loop(), str(tmp_path), range(WORKERS), lambda: None, kind=END_STEP)
    assert not copies.pending
    assert list(map(received, workers)) == [(END_STEP, LIMIT_MS), (END_STEP, 0), (END_STEP, 0)]


@pytest.mark.parametrize("free", [0, 1, 2])
def test_workers_are_asked_only_with_descriptors_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """A connection needs its own descriptor and that of the folder."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
        worker.bind(f"{SOCKET}0")
        worker.listen(1)
        loop = Loop()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        used = [os.dup(worker.fileno())]
        while used[-1] < highest:
            used.append(os.dup(worker.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used[-1] + 1 + free, limits[1]))
        try:
            copies = StopCopies(loop, str(tmp_path), [0], lambda: None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in used:
                os.close(fd)
        assert copies.pending is (free == 2)
        copies.close()
