"""`elasticjob run` beside another user of the machine, who can neither connect, read nor write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.etcd_server import binary, wait_until
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig

NOBODY = 65534
INTRUDER = f"""
import json, os, pathlib, socket, sys
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
reached = []
for root in map(pathlib.Path, sys.argv[2:]):
    for path in (root, *json.loads(sys.argv[1])):
        path = pathlib.Path(path)
        try:
            if path.is_socket():
                socket.socket(socket.AF_UNIX).connect(str(path))
                reached.append(f"connected to {{path}}")
            elif path.is_dir():
                os.listdir(path)
                reached.append(f"listed {{path}}")
            else:
                open(path, "rb").read(1)
                reached.append(f"read {{path}}")
        except OSError:
            pass
        try:
            if path.is_dir():
                (path / "planted").touch()
            else:
                open(path, "ab")
            reached.append(f"wrote {{path}}")
        except OSError:
            pass
print(json.dumps(reached))
"""


def inside(folder: Path) -> list[Path]:
    return [Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)]


def reached_by_nobody(*roots: Path) -> list[str]:
    """Return the accesses to these folders that succeed for another user."""
    paths = [str(path) for root in roots for path in inside(root)]
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, json.dumps(paths), *map(str, roots)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def listeners(pids: set[int]) -> list[str]:
    """Return the TCP addresses that these processes listen on, from /proc."""
    owned = set()
    for pid in pids:
        for fd in Path("/proc", str(pid), "fd").glob("*"):
            try:
                owned.add(str(fd.readlink()))
            except OSError:
                continue
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [row.split()[1] for row in rows if f"socket:[{row.split()[9]}]" in owned
            and row.split()[3] == "0A"]  # fmt: skip


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[LocalRig]:
    """Yield a rig below folders that every user may enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    rig = LocalRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("backend", "version"),
    [("Etcd", "3.4"), ("Etcd", "3.5.35"), ("Etcd", "3.6.16"), ("Etcd", "3.7.3"),
     ("EtcdV2", "3.4"), ("EtcdV2", "3.5.35")],
)  # fmt: skip
def test_other_user_cannot_connect_read_or_write(
    open_rig: LocalRig, backend: str, version: str
) -> None:
    rig = open_rig
    rig.env["PATH"] = f"{binary(version).parent}{os.pathsep}{rig.env['PATH']}"
    runner = rig.start(rig.manifest(rendezvous={"backend": backend, "keepAliveSeconds": 3}))
    rig.running(2, seconds=90)
    (run_dir,) = rig.run_dirs
    sockets = [path for path in inside(run_dir) if path.is_socket()]
    state = rig.state / "elasticjob"
    assert {"etcd:0", "peers:0", "control.sock"} <= {path.name for path in sockets}
    assert reached_by_nobody(run_dir, state) == []
    private = (run_dir, state, state / "default", state / "default" / "job")
    assert {path.stat().st_mode & 0o777 for path in private} == {0o700}
    stored = state / "default" / "job"
    awaited = "the first output of the workers"
    wait_until(lambda: any(stored.glob("logs/*/trainer.log")), awaited, PATIENCE_SECONDS)
    wait_until(lambda: any(rig.job.glob("worker-*")), awaited, PATIENCE_SECONDS)
    files = [path for path in stored.iterdir() if path.is_file()]
    files += [*stored.glob("logs/*.log"), *stored.glob("logs/*/trainer.log")]
    assert {path.name for path in files} >= {"lock", "run.json", "status.json", "trainer.log"}
    assert not [path for path in files if path.stat().st_mode & 0o077]
    (output, *_) = rig.job.glob("worker-*")
    assert output.stat().st_mode & 0o044  # the trainer's own files have the user's umask
    etcds = {pid for pid, command in rig.processes().items() if "--listen-client-urls" in command}
    assert len(etcds) == 1
    assert listeners(etcds) == []
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
