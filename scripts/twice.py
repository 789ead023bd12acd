"""Wrapper of pytest that reruns failed tests on real servers once, alone.

Tests of real processes have deadlines, and a shared machine sometimes stalls for longer than any of
them. Such a failure is printed in full, counted and named again at the end. If more than `MOST`
test functions fail, or any other test, the run has failed: with simulated time or without waits, a
rerun shows nothing new.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST = 6
REAL = ("tests/integration/", "tests/e2e/")
TESTS_FAILED = 1
"""pytest's exit status after a complete run with failures."""
CACHE = "cache_dir="
"""Prefix of the value of pytest's option `-o` that names the folder of its cache."""
FAILED = "v/cache/lastfailed"
"""File of the cache in which pytest lists the failed tests."""


def worth_a_second_look(failed: Sequence[str]) -> bool:
    """Return True if these tests, given by pytest ids, may be rerun.

    The cases of one function count once: they may share the fixture that failed.
    """
    functions = {one.partition("[")[0] for one in failed}
    return 0 < len(functions) <= MOST and all(one.startswith(REAL) for one in failed)


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed(arguments: Sequence[str]) -> list[str]:
    folders = [one.removeprefix(CACHE) for one in arguments if one.startswith(CACHE)]
    file = Path(*folders[-1:] or [".pytest_cache"], FAILED)
    return sorted(json.loads(file.read_text())) if file.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Run pytest; return its exit status, that of the rerun if there was one."""
    status = _pytest(["--cache-clear", *arguments])
    failed = _failed(arguments)
    if status != TESTS_FAILED or not worth_a_second_look(failed):
        return status
    _print("Once more, alone:", failed)
    options = [one for one in arguments if not one.startswith("tests/")]
    status = _pytest([*options, "-n0", *failed])
    verdict = "passed alone, so time is to blame or a race" if status == 0 else "failed again"
    _print(f"Failed at first, then {verdict}:", failed)
    return status


def _print(title: str, tests: Sequence[str]) -> None:
    print(f"\n{title}", *tests, sep="\n  ", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
