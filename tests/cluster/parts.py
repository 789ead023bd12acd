"""Build cache of the cluster's parts: folders, each made once.

A part is named by a hash of its ingredients, is made in a folder beside its place, and is moved
there by one rename. An existing part is therefore complete; concurrent makers wait for a lock.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from scripts.environment import key, locked
from tests.cluster.places import CACHE

_KEPT_SECONDS = 14 * 24 * 3600


def say(message: str) -> None:
    """Print a message to the terminal."""
    print(message, flush=True)


def part(name: str, ingredients: tuple[object, ...], make: Callable[[Path], None]) -> Path:
    """Return the folder of the part with exactly these ingredients; `make` fills it if absent."""
    home = CACHE / f"cluster-{name}-{key(*ingredients)}"
    lock = home.with_suffix(".lock")
    if home.is_dir():
        os.utime(lock)  # not the folder: its time goes into the images made of it
        return home
    with locked(lock):
        if not home.is_dir():
            say(f"making {home}")
            begin = time.monotonic()
            fresh = home.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            make(fresh)
            fresh.rename(home)
            _forget_unused(name)
            say(f"made {home.name} in {time.monotonic() - begin:.0f} s")
    return home


def _forget_unused(name: str) -> None:
    """Remove the parts of this name that have not been used for `_KEPT_SECONDS`."""
    oldest = time.time() - _KEPT_SECONDS
    for lock in CACHE.glob(f"cluster-{name}-????????????????.lock"):
        if lock.stat().st_mtime < oldest:
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


def content(*paths: Path) -> str:
    """Return a short hash of the names and contents of these files and folders."""
    return key(
        *(
            ingredient
            for path in paths
            for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if file.is_file() and "__pycache__" not in file.parts
            for ingredient in (file.relative_to(path.parent), file.read_bytes())
        )
    )
