"""Exact replay of seeds: twice in one process, and under any hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.sim.run import lines, simulate

SEEDS = range(17)  # one of each profile


def fingerprint(seed: int) -> str:
    trace = "\n".join(lines(simulate(seed).trace))
    return hashlib.sha256(trace.encode()).hexdigest()


@pytest.mark.parametrize("seed", SEEDS)
def test_same_seed_gives_same_trace(seed: int) -> None:
    assert fingerprint(seed) == fingerprint(seed)


def test_seeds_differ() -> None:
    assert len({fingerprint(seed) for seed in SEEDS}) == len(SEEDS)


def test_trace_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.sim.test_replay import SEEDS, fingerprint\n"
        "print([fingerprint(seed) for seed in SEEDS])"
    )
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
