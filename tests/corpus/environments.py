"""Python environments of the corpus: the locked packages of `environments/*.txt`, in the cache.

An environment sees the dependencies of this repository, torch among them, through a .pth file and
holds only what its own list adds. Its name carries a hash of the list and of those dependencies.
Packages with extensions of torch get torch's CUDA build, 2.5 GB, if the dependencies have another.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.environment import (
    IDLE_SECONDS,
    LOCKS,
    STAMP,
    dependencies,
    forget_idle,
    install_locked,
    is_complete,
    key,
    locked,
    run,
)
from scripts.environment import site_packages as packages_of
from scripts.lock import Pin, other_hashes, read, text_of

EXTENSIONS = "extensions"
"""List of the packages with extensions of torch: the index has them for its CUDA build alone."""


def cache() -> Path:
    """Return the Makefile's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "elasticjob"


def environment(folder: Path, name: str) -> Path:
    """Return the environment of the list `name`, created unless complete."""
    lock = LOCKS / f"corpus-{name}.txt"
    deps = dependencies(folder)
    wanted = key(lock.read_text(), deps)
    made = folder / f"corpus-{name}-{wanted}"
    own_lock = folder / f"corpus-{name}-{wanted}.lock"
    with locked(own_lock):
        if not is_complete(made, wanted):
            forget_idle(own_lock, IDLE_SECONDS)
            print(f"installing the corpus {name!r} into {made}", flush=True)
            _install(made, lock, deps)
            if name == EXTENSIONS and not _has_cuda(deps):
                _install_cuda(made, deps)
            (made / STAMP).write_text(wanted)
    return made


def _install(folder: Path, lock: Path, deps: Path) -> None:
    """Create the environment. The lock is complete, so that no package pulls in a CUDA library."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages_of(folder) / "dependencies.pth").write_text(f"{packages_of(deps)}\n")
    install_locked(_pip(folder, deps), lock)


def _pip(folder: Path, deps: Path) -> list[object]:
    return [deps / "bin" / "pip", "--python", folder / "bin" / "python"]


def _has_cuda(deps: Path) -> bool:
    """Return True if the torch of the dependencies is the index's CUDA build."""
    return not any(packages_of(deps).glob("torch-*+cpu.dist-info"))


def _install_cuda(folder: Path, deps: Path) -> None:
    """Install torch's CUDA build, which then precedes the torch of the dependencies."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
        lock.write(text_of("torch", [], {"torch": cuda_torch()}))
        lock.flush()
        install_locked(_pip(folder, deps), Path(lock.name), "--ignore-installed")
    install_locked(_pip(folder, deps), LOCKS / "cuda.txt")


def cuda_torch() -> Pin:
    """Return the locked torch, with the hashes of the builds that the index serves alone."""
    pin = read(LOCKS / "dev.txt")["torch"]
    return Pin(pin.version, pin.marker, pin.hashes - other_hashes()["torch"].hashes)


if __name__ == "__main__":
    environment(cache(), sys.argv[1])
