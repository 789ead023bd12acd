"""First steps of workers, read from the progress files that their scripts write.

A script that uses `elasticjob.train` writes its file wherever `ELASTICJOB_PROGRESS_FILE` points:
below ElasticJob's agent, which sets it, below torchrun and alone. A new process replaces the file,
and each file has the time of its process's first step in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from elasticjob import layout


def first_step(path: Path) -> float | None:
    """Return the Unix time of the first step in a progress file; None before it."""
    try:
        record = layout.unpack(path.read_bytes())
    except OSError:  # the process of another worker replaces it
        return None
    return record.first_step_ms / 1000 if record is not None and record.first_step_ms else None


def newest_first_step(files: Iterable[Path]) -> float | None:
    """Return the newest first step among the files of one rank, one for each of its processes."""
    found = [step for path in files if (step := first_step(path)) is not None]
    return max(found, default=None)


def all_stepped(first_steps: Sequence[float | None], since: float) -> float | None:
    """Return the time when the last rank completed its first step after `since`; None before."""
    new = [step for step in first_steps if step is not None and step > since]
    return max(new) if new and len(new) == len(first_steps) else None
