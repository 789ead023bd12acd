"""The soak, short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FAULTS = 6


@pytest.mark.timeout(300)
def test_training_survives_what_is_done_to_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.soak", f"--faults={FAULTS}", f"--output={tmp_path}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "soak.json").read_text())
    assert len(content["faults"]) == FAULTS
    assert content["accuracy"] >= 0.95
    assert content["left"] == []
