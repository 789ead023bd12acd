"""Storage of results; a full disk does not lose them, since measuring takes long."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from elasticjob_cli.output import replace_file


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write the results as JSON atomically; on failure print them and exit with status 1."""
    text = json.dumps(content, indent=2) + "\n"
    try:
        replace_file(path, text.encode())
    except OSError as error:
        print(text)
        sys.exit(f"{path} cannot be written: {error.strerror}; its content is printed above")


def keep_picture(path: Path, png: bytes) -> None:
    """Write a plot atomically; a failure is only reported, as its numbers are stored separately."""
    try:
        replace_file(path, png)
    except OSError as error:
        print(f"{path} cannot be written: {error.strerror}", file=sys.stderr)
