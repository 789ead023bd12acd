"""Pipes of a worker's standard output and error."""

from __future__ import annotations

import os

from .spawn import LaunchError


class Pipes:
    """Read and write ends, output first; raises LaunchError if pipes cannot be created."""

    def __init__(self) -> None:
        pairs: list[tuple[int, int]] = []
        try:
            pairs.append(os.pipe())
            pairs.append(os.pipe())
        except OSError as error:
            _close_all([fd for pair in pairs for fd in pair])
            raise LaunchError(126, f"no pipes for the worker's output: {error}") from error
        self.read_fds = [pair[0] for pair in pairs]
        self.write_fds = [pair[1] for pair in pairs]

    def close_read(self) -> None:
        _close_all(self.read_fds)

    def close_write(self) -> None:
        _close_all(self.write_fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
