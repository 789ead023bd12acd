"""Benchmarks and soak, small: with torch's own backends, real etcd and real training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

FAULTS = 6


def measured(folder: Path, name: str, *options: str, seconds: float = 240) -> dict[str, Any]:
    """Run a benchmark, which must succeed; return its output."""
    run = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", f"--output={folder}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def test_rendezvous_benchmark_measures_torch_backends(tmp_path: Path) -> None:
    content = measured(
        tmp_path,
        "rendezvous",
        "--without-ours",
        "--sizes=4",
        "--peers",
        "c10d",
        "etcd",
        "--repeat=1",
    )
    by_backend = {row["backend"]: row for row in content["results"]}
    assert by_backend.keys() == {"c10d", "etcd"}
    assert all(0 < row["wall_seconds"] < 60 for row in by_backend.values())
    assert by_backend["etcd"]["requests_per_member"] > 1
    assert content["ratios"] == {"c10d/4": None, "etcd/4": None}, "there is nothing to divide by"
    assert (tmp_path / "rendezvous.png").stat().st_size > 0


def test_crowd_benchmark_counts_requests_of_members_in_shared_processes(tmp_path: Path) -> None:
    content = measured(tmp_path, "crowd", "--sizes", "6", "24", "--processes=3")
    assert content["failures"] == {}
    assert content["requests_per_member"].keys() == {"6", "24"}
    assert all(1 < count <= 8 for count in content["requests_per_member"].values())


def test_jobs_benchmark_measures_operator_and_api_server(tmp_path: Path) -> None:
    content = measured(tmp_path, "jobs", "--jobs=3", "--nodes=2", "--idle-seconds=1")
    phases = {phase["name"]: phase for phase in content["phases"]}
    assert list(phases) == ["create pods", "pods run", "first round", "next round", "no change"]
    changes = [phases[name] for name in ("create pods", "first round", "next round")]
    assert all(phase["operator"] > 0 and phase["api_server"] > 0 for phase in changes)
    assert content["operator_memory_mib"] > 10


def test_overhead_benchmark_compares_training_with_and_without_agent(tmp_path: Path) -> None:
    content = measured(tmp_path, "overhead", "--turns=1", "--idle-seconds=1")
    assert content["agent"]["resident_mib"] <= 60
    assert content["agent"]["cpu_percent"] < 20
    assert content["turns"]


@pytest.mark.timeout(300)
def test_soak_faults_do_not_stop_training(tmp_path: Path) -> None:
    content = measured(tmp_path, "soak", f"--faults={FAULTS}", seconds=280)
    assert len(content["faults"]) == FAULTS
    assert content["accuracy"] >= 0.95
    assert content["left"] == []


def test_gpu_check_of_snapshots_recovers_on_the_cpu_without_lost_steps(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device=cpu", "--backend=gloo", "--warm-only",
         "--variants=snapshots", "--faults=kill-worker", f"--output={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "report.json").read_text())["results"]
    assert result["cause"] == "failure"
    assert result["seconds"] > 0
    assert result["steps_lost"] <= 2
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_gpu_check_without_a_device_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", f"--output={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "finds no CUDA device: run this on a machine with one" in done.stderr
