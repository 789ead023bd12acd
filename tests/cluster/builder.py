"""Image builds from Dockerfiles without a registry, with buildah.

The base images of the Dockerfiles are made here, under the same names. buildah runs in its own
Debian tree, in the machine's network namespace, and caches its layers.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from scripts.environment import key, locked
from scripts.golang import output
from tests.cluster import archive, pipsettings
from tests.cluster.archive import Image
from tests.cluster.debian import engine_tree, inside, needs, python_tree
from tests.cluster.parts import say
from tests.cluster.places import CACHE, ROOT, STATE

BASE = "docker.io/library/python:3.11-slim-bookworm"

_WORK = STATE / "builder"  # its layers and its output
_LOCK = CACHE / "cluster-builder.lock"
_BUILD_SECONDS = 1200
_NAMED = "{{.Name}}:{{.Tag}}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Image to build: its full name with tag, its Dockerfile, and extra build contexts."""

    name: str
    dockerfile: Path
    contexts: dict[str, Path] = field(default_factory=dict)


def build(recipe: Recipe) -> str:
    """Build the image if it is absent or outdated; return its id."""
    mounts = _prepare()
    seen = {source: f"/run/seen/{number}" for number, source in enumerate(mounts)}
    places = {name: f"/run/contexts/{name}" for name in recipe.contexts}
    ignored = recipe.dockerfile.with_name(f"{recipe.dockerfile.name}.dockerignore")
    said = _buildah(
        *("build", "--isolation", "chroot", "--network", "host", "--layers"),
        *("--pull=never", "--quiet", "--tag", recipe.name),
        *(f"--volume={seen[source]}:{place}:ro" for source, place in mounts.items()),
        *(f"--build-context={name}={place}" for name, place in places.items()),
        *([f"--ignorefile=/run/source/{ignored.relative_to(ROOT)}"] if ignored.exists() else []),
        f"--file=/run/source/{recipe.dockerfile.relative_to(ROOT)}",
        "/run/source",
        seen={
            **seen,
            **{folder(recipe.contexts[name]): place for name, place in places.items()},
        },
    )
    return said.split()[-1]


def _prepare() -> dict[Path, str]:
    """Prepare the inputs of every build; return host paths to mount, by place in the image."""
    with locked(_LOCK):
        _provide_base()
        text, mounts = pipsettings.here()
        settings = _WORK / f"pip-{key(text)}.conf"
        settings.write_text(text)
        return {settings: pipsettings.IN_IMAGE, **mounts}


def forget_old(recipe: Recipe) -> None:
    """Remove images that have this name with another tag, and the layers of no named image.

    No build may run: the containers of builds that were killed are removed, because they keep their
    images in use.
    """
    repository, _, tag = recipe.name.rpartition(":")
    named = [name.rpartition(":") for name in _buildah("images", "--format", _NAMED).split()]
    old = [f"{at}:{tagged}" for at, _, tagged in named if tagged != tag and _is(at, repository)]
    if old:
        _buildah("rmi", *old)
    _buildah("rm", "--all")
    _buildah("rmi", "--prune")


def _is(name: str, repository: str) -> bool:
    """Compare names; buildah adds a registry to those without one."""
    return name.removeprefix("localhost/") == repository


def save(recipe: Recipe, image: str, into: Path) -> None:
    """Write the built image into an archive."""
    fresh = _WORK / f"{key(recipe.name)}.tar"
    fresh.unlink(missing_ok=True)
    _buildah("push", "--quiet", image, f"docker-archive:/run/scratch/{fresh.name}:{recipe.name}")
    fresh.replace(into)


def folder(wanted: Path) -> Path:
    """Return the wanted folder, or an empty one if it does not exist."""
    if wanted.is_dir():
        return wanted
    empty = _WORK / "empty"
    empty.mkdir(exist_ok=True)
    return empty


def _buildah(*words: str, seen: dict[Path, str] | None = None) -> str:
    needs("unshare")
    known = {
        _WORK: "/run/scratch",
        ROOT: "/run/source",
        Path("/etc/resolv.conf"): "/etc/resolv.conf",
    }
    store = ("buildah", "--root", "/run/scratch/layers", "--runroot", "/run/buildah")
    command = inside(
        engine_tree(), {**known, **(seen or {})}, "env", "TMPDIR=/run/scratch", *store, *words
    )
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"buildah {words[0]}: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def _provide_base() -> None:
    """Import the substitute for the Python base image into buildah's storage, unless present."""
    tree = python_tree()
    stamp = _WORK / "base"
    _WORK.mkdir(parents=True, exist_ok=True)
    if stamp.exists() and stamp.read_text() == tree.name:
        return
    say(f"making a stand-in for {BASE}")
    with tempfile.TemporaryDirectory(dir=_WORK) as scratch:
        layer = Path(scratch, "layer.tar")
        output("tar", "--numeric-owner", "--sort=name", "-C", tree, "-cf", layer, ".")
        made = Image(BASE, (layer,), {"Cmd": ["python3"]})
        archive.write(Path(scratch, "base.tar"), [made])
        _buildah("pull", "--quiet", f"docker-archive:/run/scratch/{Path(scratch).name}/base.tar")
    stamp.write_text(tree.name)
