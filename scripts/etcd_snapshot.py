"""Generator of the chart's first data of etcd: `python -m scripts.etcd_snapshot CACHE`.

Its database has authentication enabled and root as the only user, with a random password that is
stored nowhere. The result differs at each run; tests/integration/chart/test_initial_data.py checks
the committed one.
"""

from __future__ import annotations

import gzip
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.environment import ROOT
from scripts.golang import output

ETCD = "etcd-3.6*"
SNAPSHOT = ROOT / "operator/elasticjob_operator/etcd_tls/authentication.db.gz"
START_SECONDS = 30.0


def database(programs: Path, folder: Path) -> bytes:
    """Return the database of a new etcd with authentication; `folder` is empty."""
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        client, peer = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
    command = [str(programs / "etcd"), f"--data-dir={folder}", "--bcrypt-cost=4"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=default={peer}", "--log-level=fatal"]
    etcdctl = (programs / "etcdctl", f"--endpoints={client}")
    with subprocess.Popen(command) as server:
        try:
            deadline = time.monotonic() + START_SECONDS
            while subprocess.run([*etcdctl, "endpoint", "health"], capture_output=True).returncode:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise RuntimeError("etcd did not start: its log is above")
                time.sleep(0.1)
            output(*etcdctl, "user", "add", f"root:{secrets.token_urlsafe(32)}")
            output(*etcdctl, "role", "add", "root")
            output(*etcdctl, "user", "grant-role", "root", "root")
            output(*etcdctl, "auth", "enable")
        finally:
            server.terminate()
    output(programs / "etcdutl", "defrag", f"--data-dir={folder}")
    return (folder / "member" / "snap" / "db").read_bytes()


def main() -> None:
    """Write the snapshot into the operator's package."""
    programs = max(Path(sys.argv[1]).glob(ETCD))
    with tempfile.TemporaryDirectory() as scratch:
        made = database(programs, Path(scratch) / "data")
    packed = gzip.compress(made, mtime=0)
    SNAPSHOT.write_bytes(packed)
    sys.stdout.write(f"{SNAPSHOT}: {len(made)} bytes, {len(packed)} packed\n")


if __name__ == "__main__":
    main()
