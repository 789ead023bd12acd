"""Paths of a run's rendezvous in etcd; the only module that builds or parses them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.text import echoed

DEFAULT_PREFIX = "/torchelastic/p2p"
_UNSAFE = re.compile(r"[?#%]|[^\S ]")


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of `run_id` under `prefix`, which starts and ends with a slash.

    torch accepts a prefix without a leading slash, but then considers every member dead, since
    etcd's own key names have one.
    """

    prefix: str
    run_id: str

    @staticmethod
    def of(prefix: str, run_id: object) -> Paths:
        """Return the paths of a run, whose id may be a number.

        Raises ValueError for a name that cannot be part of a URL.
        """
        run_id = "" if run_id is None else str(run_id)
        if not run_id or _UNSAFE.search(run_id):
            raise ValueError(
                "the run id must not be empty, nor contain ?#% or white space other than spaces: "
                f"{echoed(run_id)}"
            )
        if _UNSAFE.search(prefix):
            raise ValueError(
                "the etcd prefix must not contain ?#% or white space other than spaces: "
                f"{echoed(prefix)}"
            )
        inner = prefix.strip("/")
        return Paths(f"/{inner}/" if inner else "/", run_id)

    def of_run(self, path: str) -> str:
        """Return a path below the run's directory; "" gives the directory itself."""
        return f"{self.prefix}run_{self.run_id}{path if path.startswith('/') else '/' + path}"

    @property
    def run(self) -> str:
        return self.of_run("")

    @property
    def rendezvous(self) -> str:
        """Directory that waiting members watch."""
        return self.of_run("/rdzv")

    @property
    def counter(self) -> str:
        return self.of_run("/rdzv/version_counter")

    @property
    def active(self) -> str:
        return self.of_run("/rdzv/active_version")

    def version(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}")

    def keep_alive(self, version: str, rank: int) -> str:
        return self.of_run(f"/rdzv/v_{version}/rank_{rank}")

    def extra_data(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}/extra_data")

    def store(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}/kv")


def is_keep_alive(key: str) -> bool:
    """Return True if the key is a member's keep-alive key of any version."""
    return re.search(r"/v_\d+/rank_\d+$", key) is not None


def rank_of(keep_alive: str) -> int | None:
    """Return the rank in a keep-alive key; None for other keys."""
    found = re.search(r"/rank_(\d+)$", keep_alive)
    return int(found[1]) if found else None
