"""Programs and output folder of the benchmarks; the only module that reads the environment."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OUTPUT = REPOSITORY / "build" / "bench"
OUR_ETCD_VERSION = "3.7.3"
# Both of torch's etcd backends use the v2 API, which etcd has not had since 3.6.
PEERS_ETCD_VERSION = "3.4"


class ProgramMissing(Exception):
    """Server that a benchmark needs and that is not installed."""


def etcd_binary(version: str) -> Path:
    """Return the etcd of a version from $ELASTICJOB_ETCD_DIR, else the cache, else PATH."""
    configured = os.environ.get("ELASTICJOB_ETCD_DIR")
    folders = [Path(configured)] if configured else []
    folders.append(Path.home() / ".cache" / "elasticjob")
    for folder in folders:
        if (binary := folder / f"etcd-{version}" / "etcd").is_file():
            return binary
    if found := shutil.which("etcd"):
        return Path(found)
    raise ProgramMissing(
        f"no etcd {version}: looked for etcd-{version}/etcd in {', '.join(map(str, folders))} and"
        " for etcd on PATH; install it (Debian: etcd-server) or set ELASTICJOB_ETCD_DIR"
    )


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of an agent under test: this one, with our packages importable."""
    packages = [
        str(REPOSITORY / room) for room in ("operator", "sdk", "rendezvous", "sidecar", "cli")
    ]
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*packages, *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def fresh_id(purpose: str) -> str:
    """Return a run id that is unique among all cases and users of this machine."""
    return f"bench-{purpose}-{uuid.uuid4().hex[:10]}"
