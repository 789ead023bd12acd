"""Output that survives a full disk or a closed stream: final summaries and atomic file writes.

A file gets the complete new content or keeps the old one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path


@contextlib.contextmanager
def final_summary() -> Iterator[None]:
    """Attempt the prints of the body; a failure is reported and changes no exit code."""
    refused = None
    try:
        yield
    except OSError as error:
        refused = error
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None if it was closed when this process started
                stream.flush()
        except OSError as error:
            refused = error
            with contextlib.suppress(OSError):
                stream.close()  # else its buffer would be flushed again at exit
    if refused is not None and not sys.stderr.closed:
        with contextlib.suppress(OSError):
            print(f"elasticjob: the output cannot be written: {refused.strerror}", file=sys.stderr)


_NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a folder without write permission, or of a file that is itself a mount point."""


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content; follow a symbolic link, write to a device or pipe.

    Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    try:
        replace_atomically(target, content)
    except OSError as error:
        if error.errno not in _NOT_BESIDE or not target.exists():
            raise
        overwrite_in_place(target, content)


def replace_atomically(target: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new one. Raises OSError."""
    draft = target.with_name(f".elasticjob-{os.urandom(8).hex()}")
    try:
        with draft.open("xb") as file:
            if target.exists():
                before = target.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                with contextlib.suppress(OSError):  # another user's file: it becomes ours
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def overwrite_in_place(target: Path, content: bytes) -> None:
    """Overwrite a file in place without freeing its space first. Raises OSError."""
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
