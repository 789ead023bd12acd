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

from scripts.environment import forget_idle, key, locked
from tests.cluster.places import CACHE

_IDLE_SECONDS = 3600.0
"""Time after its last use in which a part may still be in use."""


def say(message: str) -> None:
    """Print a message to the terminal."""
    print(message, flush=True)


def part(
    name: str,
    ingredients: tuple[object, ...],
    make: Callable[[Path], None],
    gigabytes: int = 1,
) -> Path:
    """Return the folder of the part with exactly these ingredients; `make` fills it if absent.

    `gigabytes` is the free disk space that `make` needs. Raises RuntimeError if there is less after
    the removal of older parts of this name.
    """
    home = CACHE / f"cluster-{name}-{key(*ingredients)}"
    lock = home.with_suffix(".lock")
    if home.is_dir():
        os.utime(lock)  # not the folder: its time goes into the images made of it
        return home
    with locked(lock):
        if not home.is_dir():
            say(f"making {home}")
            begin = time.monotonic()
            forget_idle(lock, _IDLE_SECONDS)
            _check_space(home, gigabytes)
            fresh = home.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            make(fresh)
            fresh.rename(home)
            say(f"made {home.name} in {time.monotonic() - begin:.0f} s")
    return home


def _check_space(home: Path, gigabytes: int) -> None:
    free = shutil.disk_usage(home.parent).free / 1e9
    if free < gigabytes:
        raise RuntimeError(
            f"{home.name} needs {gigabytes} GB of disk space and {home.parent} has {free:.1f} GB: "
            "free some, for instance by removing folders there that are not in use"
        )


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
