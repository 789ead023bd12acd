"""Refusal of torchrun inside of a worker that runs with `launch: PerWorker`.

A script that starts torchrun itself would train once in each worker. Rank 0, or the first of
several workers of a node, may start a job of its own, such as an evaluation; if every worker starts
one, another rank is refused at once. A parent may ignore the exit code of its child and end with
success, so the worker itself is aborted.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from typing import NoReturn

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ROUND = "ELASTICJOB_ROUND"
REASON = "elasticjob_reason"
"""Key in the error file; the agent reads it, too."""
NESTED_LAUNCH = "NestedLaunch"


def refuse() -> NoReturn:
    """Raise RuntimeError in a worker; in a process that a worker started, fail the worker with the
    same text, and exit."""
    worker = _worker()
    is_child = worker != os.getpid()
    started = f" as `{shlex.join(sys.argv)}`" if is_child else ""
    message = (
        f"torchrun was started by a worker (rank {os.environ.get('RANK')}: {_command(worker)})"
        f"{started} and would train once for each worker: set spec.launch to PerNode, which runs "
        "the command once for each pod, or to PerWorker if each worker is to start a job of its own"
    )
    if not is_child:
        raise RuntimeError(message)
    _write_error_file(message)
    print(message, file=sys.stderr, flush=True)  # noqa: T201
    os.kill(worker, signal.SIGABRT)
    os._exit(1)  # torchrun would replace the error file by its own


def _worker() -> int:
    """Return the pid of the worker: the outermost process of this round above this one."""
    mark = f"{ROUND}={os.environ.get(ROUND, '')}".encode()
    found = pid = os.getpid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
                if mark in file.read().split(b"\0"):
                    found = pid
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            words = file.read().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "unknown command"
    return shlex.join(words)


def _write_error_file(message: str) -> None:
    path = os.environ.get(ERROR_FILE, "")
    if not path or os.path.exists(path):  # noqa: PTH110
        return
    stamp = str(int(time.time()))
    extra = {"py_callstack": "", "timestamp": stamp, REASON: NESTED_LAUNCH}
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    except OSError:
        pass  # the text is in the worker's standard error, too
