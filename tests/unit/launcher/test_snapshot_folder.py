"""Folder in memory for snapshots: its owner, its end, and folders of killed launchers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

from elasticjob import layout
from elasticjob.train.snapshots.memory import copy_requests, stop_copy
from elasticjob_cli.local import supervisor
from elasticjob_launcher import snapshot_folder
from elasticjob_launcher.app import Launcher
from elasticjob_launcher.processes import stop_copies
from elasticjob_launcher.settings import read_settings
from elasticjob_launcher.snapshot_folder import SnapshotFolder, remove_abandoned
from tests.paths import ROOT

OWNER = """
import sys, time
from pathlib import Path
from elasticjob_launcher.snapshot_folder import SnapshotFolder

print(SnapshotFolder(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def killed(parent: Path) -> Path:
    """Return the folder of a launcher that was killed with a snapshot in it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sidecar")}
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / "shared.0").write_bytes(b"x")
        remove_abandoned(parent)
        assert folder.exists()  # its owner lives
        owner.send_signal(signal.SIGKILL)
    return folder


def test_folder_is_private_and_ends_with_its_launcher(tmp_path: Path) -> None:
    first, second = SnapshotFolder(tmp_path), SnapshotFolder(tmp_path)
    assert first.path is not None
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    (first.path / "shared.0").write_bytes(b"x")
    assert first.environment == {
        layout.SNAPSHOT_FOLDER: str(first.path),
        layout.SNAPSHOT_TROUBLE: "",
    }
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []
    first.close()


def test_folder_of_a_killed_launcher_is_removed_by_the_next_one(tmp_path: Path) -> None:
    folder = killed(tmp_path)
    assert folder.exists()
    other = SnapshotFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()


def test_supervisor_of_a_local_job_removes_folders_of_killed_launchers(tmp_path: Path) -> None:
    folder, living = killed(tmp_path), SnapshotFolder(tmp_path)
    supervisor.remove_snapshots(tmp_path)
    assert list(tmp_path.iterdir()) == [living.path]
    assert not folder.exists()
    living.close()


def test_machine_without_shared_memory_hides_an_inherited_folder(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "missing")
    assert folder.path is None
    missing = f"{errno.ENOENT} {tmp_path / 'missing'}"
    assert folder.environment == {layout.SNAPSHOT_FOLDER: "", layout.SNAPSHOT_TROUBLE: missing}
    folder.close()


def test_memory_that_is_turned_off_is_no_trouble() -> None:
    hidden = {layout.SNAPSHOT_FOLDER: "", layout.SNAPSHOT_TROUBLE: ""}
    assert SnapshotFolder(None).environment == hidden


def test_launcher_library_and_supervisor_agree_on_the_names() -> None:
    assert snapshot_folder.VARIABLE == layout.SNAPSHOT_FOLDER
    assert snapshot_folder.TROUBLE == layout.SNAPSHOT_TROUBLE
    assert f"{snapshot_folder.PREFIX}*" == supervisor.SNAPSHOTS


def test_launcher_and_library_agree_on_the_requests_for_copies() -> None:
    for name in ("SOCKET", "MAGIC"):
        assert getattr(stop_copies, name) == getattr(copy_requests, name)
    assert stop_copies.COPY_SECONDS == stop_copy.COPY_SECONDS
    assert stop_copies.ANSWER.format == copy_requests.ANSWER.format
    # The answer to a launcher without a request comes in time, and the request to a worker as well
    # if the launcher has no processor for a moment.
    assert 0.5 <= copy_requests.REQUEST_SECONDS <= stop_copies.ANSWER_SECONDS / 2
    assert snapshot_folder.SHARED_MEMORY == supervisor.SHARED_MEMORY


def test_folder_can_be_elsewhere_or_absent(tmp_path: Path) -> None:
    settings = read_settings(["--", "true"], {"ELASTICJOB_SNAPSHOT_VOLUME": str(tmp_path)})
    launcher = Launcher(settings, {})
    made = worker_variable(launcher)
    assert made is not None
    assert Path(made).parent == tmp_path
    launcher._snapshots.close()
    off = read_settings(["--", "true"], {"ELASTICJOB_SNAPSHOT_VOLUME": "off"})
    assert worker_variable(Launcher(off, {snapshot_folder.VARIABLE: "/inherited"})) == ""
    other = Launcher(off, {"ELASTICJOB_SNAPSHOT_VOLUME": "off"})
    assert worker_variable(other, "VOLUME") is None  # of the launcher alone


def worker_variable(launcher: Launcher, name: str = "FOLDER") -> str | None:
    return launcher._env.get(f"ELASTICJOB_SNAPSHOT_{name}")
