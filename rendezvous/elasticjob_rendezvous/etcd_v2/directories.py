"""Directories of a run in etcd: created by the first member, and restored if they are lost.

etcd 3.5 cannot renew a directory's time to live (etcd-io/etcd#13589): there a run's directory
expires with all its contents two hours after its creation. Members still in training restore it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import etcd

from elasticjob_rendezvous.etcd_v2.core.records import RUN_TTL_SECONDS, Paths


def make_folder(client: Any, path: str, ttl_seconds: int | None = None) -> None:
    """Create a directory unless it exists."""
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        client.write(path, None, dir=True, prevExist=False, ttl=ttl_seconds)


def is_lost(client: Any, paths: Paths) -> bool:
    """Return True if the run's counter is missing, which is never deleted with the run present."""
    try:
        client.get(paths.counter)
    except etcd.EtcdKeyNotFound:
        return True
    return False


def lay_out(client: Any, paths: Paths, last_version: str | None) -> None:
    """Create missing directories and counter; versions continue after `last_version`."""
    if not is_lost(client, paths):
        return
    _make_folders(client, paths)
    with contextlib.suppress(etcd.EtcdAlreadyExist):
        client.write(paths.counter, last_version or "0", prevExist=False)


def put_back(client: Any, paths: Paths, version: str, text: str) -> None:
    """Restore the state of a lost run, unless another member has.

    The counter is written last: members that find neither state nor counter also restore, while
    a counter without state means that the version was destroyed.
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
