"""The folders of a run in etcd, made when the first member comes, and again if they get lost.

etcd 3.5 cannot renew a folder's time to live (etcd-io/etcd#13589): there a run's folder runs
out two hours after it was made, with all that is in it. Who trains on puts it back.
"""

from __future__ import annotations

import contextlib
from typing import Any

import etcd

from elasticjob_rendezvous.etcd_v2.core.paths import Paths
from elasticjob_rendezvous.etcd_v2.core.records import RUN_TTL_SECONDS


def make_folder(client: Any, path: str, ttl_seconds: int | None = None) -> None:
    """Make a folder unless it is there."""
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        client.write(path, None, dir=True, prevExist=False, ttl=ttl_seconds)


def is_lost(client: Any, paths: Paths) -> bool:
    """Whether the run has no counter: nobody deletes that while the run's folder is there."""
    try:
        client.get(paths.counter)
    except etcd.EtcdKeyNotFound:
        return True
    return False


def lay_out(client: Any, paths: Paths, last_version: str | None) -> None:
    """Make folders and counter, unless they are there; versions go on after the last known."""
    if not is_lost(client, paths):
        return
    _make_folders(client, paths)
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        client.write(paths.counter, last_version or "0", prevExist=False)


def put_back(client: Any, paths: Paths, version: str, text: str) -> None:
    """Put the state of a lost run back as it was, unless another member has.

    The counter goes last: others who find neither state nor counter do the same, and who
    found a counter alone would take the version for destroyed.
    """
    _make_folders(client, paths)
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        client.write(paths.active, text, prevExist=False)
    lay_out(client, paths, version)


def _make_folders(client: Any, paths: Paths) -> None:
    if paths.prefix != "/":
        make_folder(client, paths.prefix)
    make_folder(client, paths.run, RUN_TTL_SECONDS)
    make_folder(client, paths.rendezvous)
