"""Owns the parts that the cluster is made of: folders in the cache, each made once.

A part is named by a hash of what it is made from, is made in a folder beside its place, and gets
there whole, by one rename. So a part that is there is complete, and two makers wait for each other.
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
    """Tell the person at the terminal."""
    print(message, flush=True)


def part(name: str, ingredients: tuple[object, ...], make: Callable[[Path], None]) -> Path:
    """The folder of the part of exactly these ingredients, filled by `make` if it is not there."""
    home = CACHE / f"cluster-{name}-{key(*ingredients)}"
    lock = home.with_suffix(".lock")
    if home.is_dir():
        os.utime(lock)  # not the folder: its own time goes into the images that are made of it
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
    """Remove the parts of this name that nothing has asked for in a long time."""
    oldest = time.time() - _KEPT_SECONDS
    for lock in CACHE.glob(f"cluster-{name}-????????????????.lock"):
        if lock.stat().st_mtime < oldest:
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink()


def content(*paths: Path) -> str:
    """A short name for what these files, and those in these folders, are called and hold."""
    return key(
        *(
            ingredient
            for path in paths
            for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
            if file.is_file() and "__pycache__" not in file.parts
            for ingredient in (file.relative_to(path.parent), file.read_bytes())
        )
    )
