"""Lower bound of a cold start: N Python processes that import torch at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

SCRIPT = "import torch, torch.distributed, os; os._exit(0)"
"""Imports of the recovery benchmark's worker. Exits hard: an orderly teardown takes a third longer,
and no recovery waits for it."""
TIMES = 3
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Environment that both platforms give their workers; otherwise each starts a thread pool."""


def imports_seconds(number: int, script: str = SCRIPT) -> float:
    """Return the seconds from the first start to the last end, as the median of three runs.

    Raises `RuntimeError` if one of them fails.
    """
    return round(median(_once(number, script) for _ in range(TIMES)), 2)


def _once(number: int, script: str) -> float:
    began = time.monotonic()
    started = [_start(script) for _ in range(number)]
    codes = [one.wait() for one in started]
    if any(codes):
        raise RuntimeError(f"`{script}` must exit with 0: the exit codes are {codes}")
    return time.monotonic() - began


def _start(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **_ENVIRONMENT})
