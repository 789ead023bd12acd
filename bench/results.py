"""Keeping what was measured, which took long: a disk that is full does not lose it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from elasticjob_cli.wholefile import replace_file


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write it as JSON, whole; where that cannot be, print it and end with exit status 1."""
    text = json.dumps(content, indent=2) + "\n"
    try:
        replace_file(path, text.encode())
    except OSError as error:
        print(text)
        sys.exit(f"{path} cannot be written: {error.strerror}; it would hold what is printed above")


def keep_picture(path: Path, png: bytes) -> None:
    """Write it, whole; its numbers are kept beside it, so that it may be missing."""
    try:
        replace_file(path, png)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
