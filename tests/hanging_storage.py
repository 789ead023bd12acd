"""Storage of snapshots that stops answering: a call that opens one of its files never returns."""

from __future__ import annotations

import os
from pathlib import Path


class HangingStorage:
    """Named pipe among the snapshots: opening it blocks, as a call to a dead network disk does.

    Every write and every restore opens all files of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._pipe = folder / f"step-{0:012d}-{1:016x}" / "rank-9"
        self._pipe.parent.mkdir(parents=True)
        os.mkfifo(self._pipe)

    def answer(self) -> None:
        """End the blocked call, and block no other one."""
        descriptor = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)
        self._pipe.unlink()
        os.close(descriptor)
