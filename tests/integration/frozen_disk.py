"""Disk that does not answer: a frozen filesystem on a loop device, which needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES = 16 << 20


class FreezableDisk:
    """Filesystem mounted at `path` that can stop to answer; without root a plain folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.real = os.geteuid() == 0
        self._frozen = False

    def freeze(self) -> None:
        """Let each write wait in the kernel, uninterruptibly."""
        if self.real:
            _run("fsfreeze", "--freeze", self.path)
            self._frozen = True

    def thaw(self) -> None:
        """Let the writes go on."""
        if self._frozen:
            self._frozen = False
            _run("fsfreeze", "--unfreeze", self.path)


@contextmanager
def freezable_disk(folder: Path) -> Iterator[FreezableDisk]:
    """Mount a filesystem of its own in `folder`; thaw and unmount it at the end."""
    disk = FreezableDisk(folder / "disk")
    disk.path.mkdir()
    if not disk.real:
        yield disk
        return
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    _run("mkfs.ext4", "-q", "-F", image)
    _run("mount", "-o", "loop", image, disk.path)
    try:
        yield disk
    finally:
        disk.thaw()
        _run("umount", "--lazy", disk.path)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process, `D` in an uninterruptible wait."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
