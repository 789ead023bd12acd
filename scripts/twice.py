"""Runs pytest with the arguments given; what fails on real servers is run once more, alone.

A test of real processes has deadlines, and a machine that other work shares sometimes stands still
for longer than any of them. Such a failure is printed whole, counted and named again at the end. A
run with more than `MOST` of them has failed, and so has one in which anything else failed: where
time is simulated or nothing waits, a second look can show nothing new.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST = 3
REAL = ("tests/integration/", "tests/e2e/")
TESTS_FAILED = 1
"""pytest's exit status when it ran to its end; any other one is no verdict on tests."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest's own cache plugin names the tests that failed."""


def worth_a_second_look(failed: Sequence[str]) -> bool:
    """Whether these tests, by their pytest ids, may be run again."""
    return 0 < len(failed) <= MOST and all(one.startswith(REAL) for one in failed)


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed() -> list[str]:
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status, of the second run where there was one."""
    status = _pytest(["--cache-clear", *arguments])
    failed = _failed()
    if status != TESTS_FAILED or not worth_a_second_look(failed):
        return status
    print(f"\nOnce more, alone: {', '.join(failed)}\n", flush=True)
    options = [one for one in arguments if not one.startswith("tests/")]
    status = _pytest([*options, "-n0", *failed])
    verdict = "passed alone, so time is to blame or a race" if status == 0 else "failed again"
    print(f"\nFailed at first, then {verdict}: {', '.join(failed)}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
