"""Removal of temporary files and folders that outlive the process that created them."""

from __future__ import annotations

import os
from contextlib import suppress


def remove_path(path: str) -> None:
    """Remove a file, or a folder with its content."""
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108
