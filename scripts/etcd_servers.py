"""Installer of the tests' etcd servers: `python -m scripts.etcd_servers CACHE`.

Each is in `CACHE/etcd-<version>/` as `etcd` and `etcdctl`, from 3.6 also with `etcdutl`. The
versions pinned in `scripts/etcd/` are built from their Go modules, whose sums are committed there.
3.4, the oldest supported version and one of those with the v2 API, is the distribution's package,
unpacked but not installed, so that no service starts. A server counts as installed only if it
prints the expected version.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.golang import SCRIPTS, SETTINGS, go, output

PACKAGED = "3.4"
BINARIES = ("etcd", "etcdctl")
_TOOL = re.compile(r"^\t(go\.etcd\.io/etcd/(\w+)/v3)$", re.MULTILINE)


def reported_version(etcd: Path) -> str:
    """Return the version that this server prints."""
    return output(etcd, "--version").partition("etcd Version: ")[2].partition("\n")[0]


def build(pins: Path, into: Path, compiler: Path) -> None:
    """Build the pinned server and its tools from their Go modules."""
    for package, module in _TOOL.findall((pins / "go.mod").read_text()):
        binary = into / ("etcd" if module == "server" else module)
        output(compiler, "build", "-trimpath", "-o", binary, package, cwd=pins, **SETTINGS)


def unpack(into: Path) -> None:
    """Extract server and client from the distribution's packages."""
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        output(SCRIPTS / "apt", "download", "etcd-server", "etcd-client", cwd=Path(scratch))
        for package in Path(scratch).glob("*.deb"):
            output("dpkg-deb", "-x", package, scratch)
        for binary in BINARIES:
            Path(scratch, "usr", "bin", binary).rename(into / binary)


def provide(cache: Path, version: str, inputs_hash: str) -> None:
    """Install this server unless it was already installed from the same inputs."""
    home = cache / f"etcd-{version}"
    stamp = home / ".complete"
    made = stamp.exists() and stamp.read_text() == inputs_hash
    if made and reported_version(home / "etcd").startswith(version):
        return
    print(f"installing etcd {version} into {home}", flush=True)
    home.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        fresh = Path(scratch)
        if version == PACKAGED:
            unpack(fresh)
        else:
            build(SCRIPTS / "etcd" / version, fresh, go(cache))
        found = reported_version(fresh / "etcd")
        if not found.startswith(version):
            sys.exit(
                f"the tests need etcd {version}, but this distribution's package is etcd {found}: "
                f"put etcd and etcdctl {version} into {home} and {inputs_hash!r} into {stamp}"
            )
        for binary in list(fresh.iterdir()):  # rename, so that running servers keep their file
            binary.replace(home / binary.name)
    stamp.write_text(inputs_hash)


def main() -> None:
    """Install every server that is missing or out of date."""
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
