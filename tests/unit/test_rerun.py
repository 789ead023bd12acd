"""Repeated failures: selection for a second run, and its significance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.twice import MOST, worth_a_second_look
from tests.paths import ROOT

ONCE = """
from pathlib import Path

def test_here():
    ran = Path("ran")
    ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
    assert len(ran.read_text()) > {failures}
"""


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        ([], False),
        (["tests/e2e/test_a.py::test_b"], True),
        ([f"tests/integration/test_a.py::test_{one}" for one in range(MOST)], True),
        ([f"tests/integration/test_a.py::test_{one}" for one in range(MOST + 1)], False),
        ([f"tests/integration/test_a.py::test_b[{one}]" for one in range(2 * MOST)], True),
        (["tests/integration/test_a.py::test_b", "tests/sim/test_a.py::test_b"], False),
        (["tests/unit/test_a.py::test_b"], False),
    ],
)
def test_only_few_failed_tests_on_real_servers_are_rerun(failed: list[str], again: bool) -> None:
    assert worth_a_second_look(failed) is again


@pytest.mark.parametrize("cache", [(), ("-o", "cache_dir=build/own")])
@pytest.mark.parametrize(
    ("room", "failures", "status", "runs", "said"),
    [
        ("integration", 0, 0, 1, ""),
        ("integration", 1, 0, 2, "passed alone"),
        ("integration", 2, 1, 2, "failed again"),
        ("unit", 1, 1, 1, ""),
    ],
)
def test_rerun_of_failed_tests(
    tmp_path: Path,
    cache: tuple[str, ...],
    room: str,
    failures: int,
    status: int,
    runs: int,
    said: str,
) -> None:
    folder = tmp_path / "tests" / room
    folder.mkdir(parents=True)
    (folder / "test_once.py").write_text(ONCE.format(failures=failures))
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "twice.py", *cache, "-n0", f"tests/{room}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status, ended.stdout
    assert len((tmp_path / "ran").read_text()) == runs
    assert ("Once more, alone" in ended.stdout) is (runs == 2)
    assert said in ended.stdout
    named = ended.stdout.splitlines().count(f"  tests/{room}/test_once.py::test_here")
    assert named == 2 * (runs - 1), "before its rerun and after it"
