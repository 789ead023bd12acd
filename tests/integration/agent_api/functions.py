"""Worker functions of the agent tests; importable, so that spawned processes find them."""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any


def environment(word: str, local_rank: str) -> dict[str, Any]:
    """Return a worker's environment, after one line of output on each stream."""
    sys.stdout.write(f"{word} of {local_rank}\n")
    sys.stderr.write(f"complaint of {local_rank}\n")
    return {"word": word, "local_rank": local_rank, "pid": os.getpid(), **os.environ}


def fail_first(folder: str) -> str:
    """Fail rank 1 in the first round; the other ranks wait to be stopped."""
    number, rank = os.environ["ELASTICJOB_ROUND"], os.environ["RANK"]
    Path(folder, f"ran-{number}-{rank}").write_text(str(os.getpid()))
    if number != "1":
        return f"round {number}"
    if rank == "1":
        while not Path(folder, f"ran-{number}-0").exists():
            time.sleep(0.01)
        raise ArithmeticError("the loss is not a number")
    time.sleep(60)
    raise AssertionError("nobody ended this worker")


def always_fails() -> None:
    raise ArithmeticError("the loss is not a number")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def fails_without_text() -> None:
    raise TextlessError


def exits(code: int) -> None:
    sys.exit(code)


def unpicklable() -> Any:
    return lambda: None


def puts(queue: SimpleQueue[str]) -> None:
    queue.put(f"from {os.environ['RANK']}")


def waits(folder: str) -> None:
    """Report the start and wait until the test creates the file `finish`."""
    number, rank = os.environ["ELASTICJOB_ROUND"], os.environ["RANK"]
    told = Path(folder, f"ran-{number}-{rank}-of-{os.environ['WORLD_SIZE']}")
    draft = told.with_name(f".{told.name}")
    draft.write_text(json.dumps({"pid": os.getpid(), **os.environ}))
    draft.replace(told)
    while not Path(folder, "finish").exists():
        time.sleep(0.02)
