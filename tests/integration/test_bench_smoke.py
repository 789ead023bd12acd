"""The rendezvous benchmark, small, with torch's own backends and real etcd."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_rendezvous_measures_torchs_backends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.rendezvous", "--without-ours", f"--output={tmp_path}"]
    run = subprocess.run(
        [*command, "--sizes=4", "--peers", "c10d", "etcd", "--repeat=1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "rendezvous.json").read_text())
    by_backend = {row["backend"]: row for row in content["results"]}
    assert by_backend.keys() == {"c10d", "etcd"}
    assert all(0 < row["wall_seconds"] < 60 for row in by_backend.values())
    assert by_backend["etcd"]["requests_per_member"] > 1
    assert content["ratios"] == {"c10d/4": None, "etcd/4": None}, "there is nothing to divide by"
    assert (tmp_path / "rendezvous.png").stat().st_size > 0


def test_crowd_counts_requests_of_members_that_share_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.crowd", f"--output={tmp_path}"]
    run = subprocess.run(
        [*command, "--sizes", "6", "24", "--processes=3"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "crowd.json").read_text())
    assert content["failures"] == {}
    assert content["requests_per_member"].keys() == {"6", "24"}
    assert all(1 < count <= 8 for count in content["requests_per_member"].values())


def test_overhead_compares_training_with_and_without_the_agent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.overhead", f"--output={tmp_path}"]
    run = subprocess.run(
        [*command, "--turns=2", "--idle-seconds=2"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "overhead.json").read_text())
    assert content["agent"]["resident_mib"] <= 60
    assert content["agent"]["cpu_percent"] < 20
    assert content["turns"]
