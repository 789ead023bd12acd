"""Installer of a checkout's Python environments: `python3 scripts/environment.py CACHE`.

There are two. The first holds every dependency and lies in the cache, named by a hash of its
inputs, so that all checkouts with the same pins share it. The second is the checkout's own `.venv`:
it includes the first through a .pth file and has only this project installed, editable, so that two
checkouts never affect each other. Both get a stamp that is written last; an environment without the
stamp, or with another key in it, is rebuilt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT.parent / "shared" / "wheels"  # optional: wheels to prefer, such as a CPU-only torch
STAMP = ".complete"
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
    """Return the extra's requirements, with references to the project's own extras resolved."""
    own = f"{project['name']}["
    found: list[str] = []
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(own):
            for name in requirement.removeprefix(own).rstrip("]").split(","):
                found += requirements(project, name.strip())
        else:
            found.append(requirement)
    return sorted({*project["dependencies"], *found})


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


def install_dependencies(environment: Path, wanted: list[str]) -> None:
    """Create an environment with the pinned dependencies, and import them as a check."""
    shutil.rmtree(environment, ignore_errors=True)
    run(sys.executable, "-m", "venv", environment)
    pins = ROOT / "constraints.txt"
    pip = [environment / "bin" / "pip", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--quiet", "--progress-bar", "off", "--constraint", pins]
    run(*pip, "pip")
    links = ["--find-links", WHEELS] if WHEELS.is_dir() else []
    run(*pip, *links, "--build-constraint", pins, *wanted)
    run(environment / "bin" / "python", "-c", "import " + ", ".join(BROUGHT))


def dependencies(cache: Path, project: dict[str, Any]) -> Path:
    """Return the shared environment of these dependencies; create it if missing."""
    wanted = requirements(project, "dev")
    pins = (ROOT / "constraints.txt").read_text()
    name = key(*wanted, pins, platform.python_version(), platform.machine())
    environment = cache / f"deps-{name}"
    with locked(cache / f"deps-{name}.lock"):
        if not is_complete(environment, name):
            print(f"installing {len(wanted)} dependencies into {environment}", flush=True)
            install_dependencies(environment, wanted)
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
    deps = dependencies(cache, settings["project"])
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
