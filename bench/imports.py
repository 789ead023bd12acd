"""What no cold start is faster than: N Pythons that import torch at once, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

SCRIPT = "import torch, torch.distributed, os; os._exit(0)"
"""What the worker of the recovery benchmark imports. The end is a hard one: to take all that down
again in good order costs a third more, and no recovery waits for that."""
TIMES = 3
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""As both platforms tell their workers; else a pool of threads starts in each."""


def imports_seconds(number: int, script: str = SCRIPT) -> float:
    """From the start of the first to the end of the last; the median of three times.

    Raises `RuntimeError` where one of them fails.
    """
    return round(median(_once(number, script) for _ in range(TIMES)), 2)


def _once(number: int, script: str) -> float:
    began = time.monotonic()
    started = [_start(script) for _ in range(number)]
    codes = [one.wait() for one in started]
    if any(codes):
        raise RuntimeError(f"`{script}` must end with 0: the exit codes are {codes}")
    return time.monotonic() - began


def _start(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **_ENVIRONMENT})
