"""Minimum of a cold start, measured with scripts that sleep or fail."""

from __future__ import annotations

import pytest

from bench.imports import imports_seconds


def test_all_processes_run_in_parallel_to_their_end() -> None:
    assert imports_seconds(3, "import time; time.sleep(0.2)") >= 0.2


def test_failed_process_gives_no_number() -> None:
    with pytest.raises(RuntimeError, match=r"the exit codes are \[3, 3\]"):
        imports_seconds(2, "raise SystemExit(3)")
