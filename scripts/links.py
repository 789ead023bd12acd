"""Page of links to a folder's wheels, with their hashes: `python links.py FOLDER >page.html`.

With `--require-hashes` pip prefers files whose hash it knows before it reads them. It knows those
of an index and of such a page, but not those of a folder.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def wheels(*folders: Path) -> dict[Path, str]:
    """Return the SHA-256 hash of every wheel in these folders."""
    found = {}
    for wheel in sorted(wheel for folder in folders for wheel in folder.glob("*.whl")):
        with wheel.open("rb") as file:
            found[wheel.resolve()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def page(found: dict[Path, str]) -> str:
    """Return a page for pip's `--find-links` with these wheels."""
    lines = [
        f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>\n'
        for wheel, digest in found.items()
    ]
    return "".join(["<!DOCTYPE html>\n", *lines])


if __name__ == "__main__":
    print(page(wheels(*map(Path, sys.argv[1:]))), end="")
