"""Python environments of the corpus: the pinned packages of `environments/*.txt`, in the cache.

An environment sees the dependencies of this repository, torch among them, through a .pth file and
holds only what its own list adds. Its name carries a hash of the list and of those dependencies.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

from scripts.environment import ROOT, STAMP, dependencies, is_complete, key, locked, run
from scripts.environment import site_packages as packages_of
from tests.corpus.manifest import LISTS


def cache() -> Path:
    """Return the Makefile's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "elasticjob"


def environment(folder: Path, name: str) -> Path:
    """Return the environment of the list `name`, created unless complete."""
    pins = LISTS / f"{name}.txt"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    deps = dependencies(folder, project)
    wanted = key(pins.read_text(), deps)
    made = folder / f"corpus-{name}-{wanted}"
    with locked(folder / f"corpus-{name}-{wanted}.lock"):
        if not is_complete(made, wanted):
            print(f"installing the corpus {name!r} into {made}", flush=True)
            _install(made, pins, deps)
            (made / STAMP).write_text(wanted)
    return made


def _install(folder: Path, pins: Path, deps: Path) -> None:
    """Create the environment. The list is complete, so that no package pulls in a CUDA library."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages_of(folder) / "dependencies.pth").write_text(f"{packages_of(deps)}\n")
    pip = [deps / "bin" / "pip", "--disable-pip-version-check", "--no-input"]
    pip += ["--python", folder / "bin" / "python", "install", "--quiet", "--progress-bar", "off"]
    run(*pip, "--no-deps", "--no-build-isolation", "--requirement", pins)


if __name__ == "__main__":
    environment(cache(), sys.argv[1])
