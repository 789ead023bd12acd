"""Owns the etcd servers that the tests run against: `python -m scripts.etcd_servers CACHE`.

Each lies in `CACHE/etcd-<version>/` as `etcd` and `etcdctl`. Those pinned in `scripts/etcd/` are
built from their Go modules, whose sums are committed there; 3.4, the oldest one supported and one
of those that still speak v2, is the distribution's package, unpacked and not installed, so that no
service starts. A server counts as there only once it has said its version.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.golang import SCRIPTS, SETTINGS, go, output

PACKAGED = "3.4"
BINARIES = ("etcd", "etcdctl")


def spoken_version(etcd: Path) -> str:
    """The version that this server says it is."""
    return output(etcd, "--version").partition("etcd Version: ")[2].partition("\n")[0]


def build(pins: Path, into: Path, compiler: Path) -> None:
    """Build the pinned server and its client from their Go modules."""
    for module, binary in (("server", "etcd"), ("etcdctl", "etcdctl")):
        package = f"go.etcd.io/etcd/{module}/v3"
        output(compiler, "build", "-trimpath", "-o", into / binary, package, cwd=pins, **SETTINGS)


def unpack(into: Path) -> None:
    """Take the distribution's server and client out of their packages."""
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        output(SCRIPTS / "apt", "download", "etcd-server", "etcd-client", cwd=Path(scratch))
        for package in Path(scratch).glob("*.deb"):
            output("dpkg-deb", "-x", package, scratch)
        for binary in BINARIES:
            Path(scratch, "usr", "bin", binary).rename(into / binary)


def provide(cache: Path, version: str, ingredients: str) -> None:
    """Make this server unless it is there, made from these ingredients."""
    home = cache / f"etcd-{version}"
    stamp = home / ".complete"
    made = stamp.exists() and stamp.read_text() == ingredients
    if made and spoken_version(home / "etcd").startswith(version):
        return
    print(f"installing etcd {version} into {home}", flush=True)
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        fresh = Path(scratch)
        if version == PACKAGED:
            unpack(fresh)
        else:
            build(SCRIPTS / "etcd" / version, fresh, go(cache))
        said = spoken_version(fresh / "etcd")
        if not said.startswith(version):
            sys.exit(
                f"the tests need etcd {version}, and this distribution's package is etcd {said}: "
                f"put etcd and etcdctl {version} into {home} and {ingredients!r} into {stamp}"
            )
        for binary in BINARIES:  # one rename each: servers that are running keep their file
            (fresh / binary).replace(home / binary)
    stamp.write_text(ingredients)


def main() -> None:
    """Bring every server up to date."""
    cache = Path(sys.argv[1])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "etcd.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for pins in sorted(SCRIPTS.glob("etcd/*")):
            pinned = (pins / "go.mod").read_bytes() + (pins / "go.sum").read_bytes()
            provide(cache, pins.name, hashlib.sha256(pinned).hexdigest())
        provide(cache, PACKAGED, "package")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed with {error.returncode}: its message is above")
