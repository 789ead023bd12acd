"""Reader of the workers' error files. User code writes them, so nothing in them is trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

MAX_ERROR_BYTES = 1024 * 1024


def read_error_file(path: Path) -> bytes | None:
    """Return the content; None if the file is missing, empty, too large, or not a regular file."""
    try:
        # Non-blocking: a user's script may have created a pipe there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(MAX_ERROR_BYTES + 1)
    except OSError:
        return None
    return content if 0 < len(content) <= MAX_ERROR_BYTES else None


def read_error_files(paths: Mapping[int, Path]) -> dict[int, bytes]:
    """Return the contents of the readable files, by local rank."""
    found = ((local_rank, read_error_file(path)) for local_rank, path in paths.items())
    return {local_rank: content for local_rank, content in found if content is not None}
