"""Copies of the training state before a stop, in a launcher at its limit of open files."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from elasticjob_launcher.loop import Loop
from elasticjob_launcher.processes.stop_copies import SOCKET, StopCopies


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
