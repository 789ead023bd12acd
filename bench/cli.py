"""Time of the command line's verbs that only read, beside an empty interpreter's and typer's.

The programs take turns, so that the machine's load changes alike for all; the first turn only warms
the page cache. `elasticjob` runs from its console script, as its users start it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import hardware
from bench.results import keep

RUNS = 15
JOBS = 20
SCRIPT = Path(sys.executable).with_name("elasticjob")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--output", type=Path, default=Path("build/bench"))
    options.add_argument("--runs", type=int, default=RUNS)
    options.add_argument("--context", help="context of a cluster for `get --context`")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), chosen.runs, chosen.context)
    for name, values in found.items():
        print(f"{name:12} median {values['median_ms']:7.1f} ms, least {values['least_ms']:7.1f} ms")
    chosen.output.mkdir(parents=True, exist_ok=True)
    keep(chosen.output / "cli.json", {"machine": hardware(), "runs": chosen.runs, "times": found})


def measure(folder: Path, runs: int, context: str | None) -> dict[str, dict[str, float]]:
    """Return the median and least milliseconds of each program by its name."""
    empty, full = folder / "empty", folder / "full"
    for number in range(JOBS):
        _store_job(full / "elasticjob" / "default" / f"job-{number}", f"job-{number}")
    python, program = [sys.executable, "-c"], [str(SCRIPT)]
    programs: dict[str, tuple[list[str], Path]] = {
        "python": ([*python, "pass"], empty),
        "typer": ([*python, "import typer"], empty),
        "help": ([*program, "--help"], empty),
        "version": ([*program, "--version"], empty),
        "get-0": ([*program, "get"], empty),
        f"get-{JOBS}": ([*program, "get"], full),
    }
    if context is not None:
        programs["get-cluster"] = ([*program, "get", "--context", context], empty)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(runs + 1):
        for name, (words, state) in programs.items():
            spent = _milliseconds(words, state)
            if turn:
                times[name].append(spent)
    return {
        name: {"median_ms": round(median(spent), 1), "least_ms": round(min(spent), 1)}
        for name, spent in times.items()
    }


def _milliseconds(words: list[str], state: Path) -> float:
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    subprocess.run(words, env=environment, check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000


def _store_job(folder: Path, name: str) -> None:
    """Store a job that has ended, with eight members and rounds."""
    pods = [f"{name}-{index}" for index in range(8)]
    container = {"name": "trainer", "image": "none", "command": ["true"]}
    document: dict[str, Any] = {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"maxNodes": 8, "template": {"spec": {"containers": [container]}}},
        "status": {
            "phase": "Succeeded",
            "nodes": 8,
            "members": [{"pod": pod, "state": "done", "round": 8} for pod in pods],
            "rounds": [
                {"round": n, "cause": "loss", "members": pods, "nodes": 8} for n in range(8)
            ],
        },
    }
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
