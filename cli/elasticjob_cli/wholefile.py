"""Writing a file for a user: it is there whole, or what was there before is."""

from __future__ import annotations

import contextlib
import errno
import os
from io import FileIO
from pathlib import Path

_NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""A folder that takes no new file, or a file that is mounted alone, as in a container."""


def replace_file(path: Path, content: bytes) -> None:
    """Raises OSError. A symbolic link stays one; a device or pipe is given the content."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    try:
        swap(target, content)
    except OSError as error:
        if error.errno not in _NOT_BESIDE or not target.exists():
            raise
        overwrite(target, content)


def swap(target: Path, content: bytes) -> None:
    """At one moment: who reads it sees the old file or the new one. Raises OSError."""
    draft = target.with_name(f".elasticjob-{os.urandom(8).hex()}")
    try:
        with draft.open("xb") as file:
            if target.exists():
                before = target.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                with contextlib.suppress(OSError):  # of another user: then it is ours from now on
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def overwrite(target: Path, content: bytes) -> None:
    """In its place and room, none of which is let go of before. Raises OSError."""
    with target.open("r+b", buffering=0) as file:
        before = file.read()
        try:
            _fill(file, content)
        except OSError:
            with contextlib.suppress(OSError):
                _fill(file, before)
            raise


def _fill(file: FileIO, content: bytes) -> None:
    file.seek(0)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.truncate(len(content))
