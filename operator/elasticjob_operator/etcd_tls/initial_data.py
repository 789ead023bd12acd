"""Command `python -m elasticjob_operator etcd-data`: first data of a bundled etcd's new member.

An etcd without data has no users, and allows everything to every client. Therefore a member without
data starts from a snapshot in which authentication is on and root is the only user. Its password
was random and is stored nowhere: the operator authenticates by its certificate, and sets its own.

`etcdutl snapshot restore` runs between the two steps, in etcd's image. It refuses a folder that
exists, so `prepare` removes the files of an earlier start of the pod.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import ssl
import sys
import urllib.request
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

SNAPSHOT = "authentication.db.gz"
"""Database of an etcd with authentication and root; made by `python -m scripts.etcd_snapshot`."""

PREPARED, RESTORED = "authentication.db", "data"
"""Names in the scratch folder: the snapshot, and the data that etcdutl makes of it."""

REQUEST_SECONDS = 3.0
MAX_ANSWER_BYTES = 1 << 20


def prepare(scratch: Path) -> str:
    """Write the snapshot for etcdutl into the scratch folder; return a line for the log."""
    shutil.rmtree(scratch / RESTORED, ignore_errors=True)
    packed = resources.files(__package__).joinpath(SNAPSHOT).read_bytes()
    (scratch / PREPARED).write_bytes(gzip.decompress(packed))
    return f"wrote {scratch / PREPARED}"


def install(scratch: Path, data: Path, name: str, peers: Sequence[str], tls: Path) -> str:
    """Make the restored data the member's, unless it has data; return a line for the log.

    The data of a member that its cluster knows was lost: the member may have acknowledged writes
    that it no longer has. As without this step, etcd then refuses to start, and names the reason.

    Args:
        data: etcd's data folder.
        peers: peer addresses of the other members.
        tls: folder with ca.crt, tls.crt and tls.key.
    """
    restored = scratch / RESTORED
    try:
        if any(data.glob("member/wal/*.wal")):
            return f"{data} has data: nothing to do"
        for peer in peers:
            if _has_member(peer, name, tls):
                return f"{peer} knows {name}, whose data is lost: remove and add this member"
        fresh = data.with_name(f"{data.name}.new")
        for stale in (fresh, data):  # of a start that ended before etcd had written its log
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(restored, fresh)
        _sync(fresh)
        fresh.rename(data)
        _sync_folder(data.parent)
        return f"{data} begins with authentication enabled"
    finally:
        shutil.rmtree(restored, ignore_errors=True)


def _has_member(peer: str, name: str, tls: Path) -> bool:
    """Return True if this member of a running cluster reports that `name` has served clients."""
    context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
    context.load_cert_chain(tls / "tls.crt", tls / "tls.key")
    url = f"{peer}/members"
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS, context=context) as reply:
            members = json.loads(reply.read(MAX_ANSWER_BYTES))
        return any(member.get("name") == name and member.get("clientURLs") for member in members)
    except (OSError, ValueError, AttributeError):
        return False  # it does not run, or has not formed a cluster


def _sync(folder: Path) -> None:
    """Write the folder's files to the disk, so that a rename shows all of them or none."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
            _sync_folder(path)
        else:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    folder.chmod(0o700)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str]) -> int:
    """Run one step; return the exit code: 0 when it is done, 1 on failure, 2 on wrong usage."""
    parser = argparse.ArgumentParser("elasticjob_operator etcd-data", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    first = steps.add_parser("prepare", help="write the snapshot that etcdutl restores")
    second = steps.add_parser("install", help="give the restored data to a member without data")
    for step in (first, second):
        step.add_argument("--scratch", type=Path, required=True, help="folder shared with etcdutl")
    second.add_argument("--data-dir", type=Path, required=True, help="etcd's data folder")
    second.add_argument("--name", required=True, help="name of the member")
    second.add_argument(
        "--initial-cluster", required=True, help="NAME=URL of all members, as etcd takes it"
    )
    second.add_argument("--tls", type=Path, required=True, help="folder of etcd's certificates")
    given = parser.parse_args(arguments)
    try:
        if given.step == "prepare":
            line = prepare(given.scratch)
        else:
            peers = _others(given.initial_cluster, given.name)
            line = install(given.scratch, given.data_dir, given.name, peers, given.tls)
    except OSError as error:
        sys.stderr.write(f"etcd-data {given.step}: {error}\n")
        return 1
    sys.stdout.write(f"{line}\n")
    return 0


def _others(initial_cluster: str, name: str) -> list[str]:
    """Return the peer addresses of all members except this one."""
    members = dict(part.split("=", 1) for part in initial_cluster.split(",") if "=" in part)
    return [url for other, url in members.items() if other != name and urlsplit(url).hostname]
