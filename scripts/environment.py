"""Installer of a checkout's Python environments: `python3 -m scripts.environment CACHE`.

There are two. The first holds every dependency and lies in the cache, named by a hash of its
inputs, so that all checkouts with the same pins share it. The second is the checkout's own `.venv`:
it includes the first through a .pth file and has only this project installed, editable, so that two
checkouts never affect each other. Both get a stamp that is written last; an environment without the
stamp, or with another key in it, is rebuilt.

pip installs exactly the versions in `requirements/`, and no file without one of the hashes there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.links import page, wheels

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT.parent / "shared" / "wheels"  # optional: wheels to prefer, such as a CPU-only torch
LOCKS = ROOT / "requirements"
STAMP = ".complete"
IDLE_SECONDS = 24 * 3600.0
"""Time after its last use in which an environment is kept for the checkouts that refer to it."""
# Imported after an installation, to check that the dependencies are present and load.
BROUGHT = (
    *("cryptography", "etcd", "grpc", "hatchling", "hypothesis", "importlinter", "jsonschema"),
    *("kopf", "kubernetes", "matplotlib", "mypy", "numpy", "prometheus_client", "pydantic"),
    *("pyetcd", "pytest", "pytest_timeout", "rich", "sklearn", "torch", "typer", "xdist", "yaml"),
)
PACKAGES = (
    "elasticjob", "elasticjob_agent", "elasticjob_cli", "elasticjob_launcher",
    "elasticjob_operator", "elasticjob_rendezvous",
)  # fmt: skip


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """Return the extra's requirements, with references to the project's own extras resolved.

    The project's dependencies are its users' default, not a part of an extra.
    """
    own = f"{project['name']}["
    found: list[str] = []
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(own):
            for name in requirement.removeprefix(own).rstrip("]").split(","):
                found += requirements(project, name.strip())
        else:
            found.append(requirement)
    return sorted(set(found))


def key(*parts: object) -> str:
    """Return a short hash of these inputs."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that concurrent builds of one environment wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def forget_idle(lock: Path, idle_seconds: float) -> None:
    """Remove other versions of a cached folder, and incomplete ones, after `idle_seconds`.

    A version is a folder named `<name>-<hash>` beside its lock, `<name>-<hash>.lock`, whose
    modification time is that of the last use. The version of `lock` and the most recently used
    other complete one stay.
    """
    name = lock.stem.rpartition("-")[0]
    others = [
        other for other in lock.parent.glob(f"{name}-{'[0-9a-f]' * 16}.lock") if other != lock
    ]
    used = {other: other.stat().st_mtime for other in others}
    complete = [other for other in others if other.with_suffix("").is_dir()]
    newest = max(complete, key=used.__getitem__, default=None)
    for other in others:
        if other == newest or time.time() - used[other] < idle_seconds:
            continue
        with other.open() as held, contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in (other.with_suffix(""), other.with_suffix(".new")):
                shutil.rmtree(folder, ignore_errors=True)
            other.unlink()


def is_complete(environment: Path, wanted: str) -> bool:
    """Return True if the environment was completed from these inputs and has its Python."""
    stamp = environment / STAMP
    return (
        (environment / "bin" / "python").exists() and stamp.exists() and stamp.read_text() == wanted
    )


def run(*command: object) -> None:
    """Run a command that must succeed."""
    subprocess.run([str(word) for word in command], check=True, stdin=subprocess.DEVNULL, cwd=ROOT)


def site_packages(environment: Path) -> Path:
    """Return the site-packages folder of an environment made by this Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


def install_locked(pip: Sequence[object], lock: Path, *options: object) -> None:
    """Install exactly the packages of a lock file with this pip, which refuses other hashes.

    Build requirements are hashed too: `build.txt` contains them, and pip gets them from the
    environment.
    """
    quiet = ("--disable-pip-version-check", "--no-input", "install", "--quiet")
    options = ("--progress-bar", "off", "--no-deps", "--no-build-isolation", *options)
    run(*pip, *quiet, *options, "--require-hashes", "--requirement", lock)


def install_dependencies(environment: Path) -> None:
    """Create an environment with the locked dependencies, and import them as a check."""
    shutil.rmtree(environment, ignore_errors=True)
    run(sys.executable, "-m", "venv", environment)
    pip = environment / "bin" / "pip"
    install_locked([pip], LOCKS / "build.txt")
    preferred = wheels(*preferred_folders())
    for wheel in unlocked(preferred, (LOCKS / "dev.txt").read_text()):
        print(f"not using {wheel}: its hash is not in requirements/other-hashes.txt", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".html") as links:
        links.write(page(preferred))
        links.flush()
        install_locked([pip], LOCKS / "dev.txt", "--find-links", links.name)
    check = [str(pip), "--disable-pip-version-check", "check"]
    if subprocess.run(check, stdout=subprocess.DEVNULL, check=False).returncode:
        install_locked([pip], LOCKS / "cuda.txt")  # which only torch's CUDA build requires
        run(*check)
    run(environment / "bin" / "python", "-c", "import " + ", ".join(BROUGHT))


def unlocked(found: dict[Path, str], lock: str) -> list[Path]:
    """Return the wheels of locked packages whose hashes are not in the lock."""
    names = {line.partition("==")[0] for line in lock.splitlines()}
    return [
        wheel
        for wheel, digest in found.items()
        if wheel.name.partition("-")[0].replace("_", "-").lower() in names and digest not in lock
    ]


def preferred_folders() -> list[Path]:
    """Return the folders of wheels to prefer: WHEELS and those that pip's environment names."""
    named = [Path(place) for place in os.environ.get("PIP_FIND_LINKS", "").split()]
    return [folder for folder in (WHEELS, *named) if folder.is_dir()]


def dependencies(cache: Path) -> Path:
    """Return the shared environment of the locked dependencies; create it if missing."""
    locks = [(LOCKS / f"{lock}.txt").read_text() for lock in ("build", "dev", "cuda")]
    name = key(*locks, platform.python_version(), platform.machine())
    environment = cache / f"deps-{name}"
    lock = cache / f"deps-{name}.lock"
    with locked(lock):
        if not is_complete(environment, name):
            forget_idle(lock, IDLE_SECONDS)
            print(f"installing the dependencies into {environment}", flush=True)
            install_dependencies(environment)
            (environment / STAMP).write_text(name)
    return environment


def install_project(environment: Path, deps: Path) -> None:
    """Create the checkout's environment: dependencies by reference, the project editable."""
    shutil.rmtree(environment, ignore_errors=True)
    run(deps / "bin" / "python", "-m", "venv", "--without-pip", environment)
    (site_packages(environment) / "dependencies.pth").write_text(f"{site_packages(deps)}\n")
    python = environment / "bin" / "python"
    pip = [deps / "bin" / "pip", "--disable-pip-version-check", "--quiet", "--python", python]
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--no-index", "--editable", ROOT)
    run(python, "-c", "import " + ", ".join(PACKAGES))


def main() -> None:
    """Bring both environments up to date."""
    cache = Path(sys.argv[1])
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    deps = dependencies(cache)
    environment = ROOT / ".venv"
    wanted = key(settings["build-system"], settings["project"], settings["tool"]["hatch"], deps)
    with locked(cache / f"checkout-{key(ROOT)}.lock"):
        if not is_complete(environment, wanted):
            print(f"installing this checkout into {environment}", flush=True)
            install_project(environment, deps)
            (environment / STAMP).write_text(wanted)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # keep other packages out of the environments
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with {error.returncode}: its message is above")
