"""What a worker says of its training, read from its progress file. Nothing in it is trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticjob import layout

TEXT_BYTES = 64 * 1024
"""A text longer than this is no progress file."""


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The latest word of one worker of a round. Times are milliseconds since 1970.

    Args:
        step, at_ms: the last step that it told, and when; -1 and 0 before the first.
        checkpoint_step: contained in the last checkpoint that it told; -1 before the first.
        checkpoints: how many it told, where it says so.
        first_step_ms: when it told its first step; None before that, or unknown.
        points: places passed at which all ranks could have saved together.
        saves: its script asked to save before a planned stop.
        metrics: numbers for people.
        saved_ns: when it last wrote the file that tells nothing but checkpoints; 0 for never.
    """

    step: int = -1
    at_ms: int = 0
    checkpoint_step: int = -1
    checkpoints: int = 0
    first_step_ms: int | None = None
    points: int = 0
    saves: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_ns: int = 0


def worker_progress(content: bytes, written_ms: int) -> WorkerProgress | None:
    """What a progress file says; None when it says nothing, or nothing whole.

    `written_ms` is when it was written, for a text: it need not tell its time.
    """
    if content[:1] == b"{":
        return _from_text(content, written_ms)
    record = layout.unpack(content)
    if record is None:
        return None
    return WorkerProgress(
        step=_whole(record.step),
        at_ms=record.at_ms,
        checkpoint_step=_whole(record.checkpoint_step),
        checkpoints=record.checkpoints,
        first_step_ms=record.first_step_ms or None,
        points=record.points,
        saves=bool(record.flags & layout.SAVES),
        # One NaN for all: what did not change must be equal to what it was.
        metrics={
            name: math.nan if math.isnan(value) else value
            for name, value in layout.metrics_of(record).items()
        },
    )


def with_saved(said: WorkerProgress, content: bytes, written_ns: int) -> WorkerProgress:
    """With what the file says that tells nothing but checkpoints: it may name their step."""
    step = content.strip()[:20]
    named = int(step) if step.isdigit() else -1
    return replace(
        said,
        saves=True,
        saved_ns=written_ns,
        checkpoint_step=max(said.checkpoint_step, _whole(named)),
    )


def _from_text(content: bytes, written_ms: int) -> WorkerProgress | None:
    """`{"step": 7, "checkpoint": 5, "saves": true, "loss": 0.25}`, all of it optional."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    step, checkpoint = _whole(said.get("step")), _whole(said.get("checkpoint"))
    return WorkerProgress(
        step=step,
        at_ms=written_ms if step >= 0 else 0,
        checkpoint_step=checkpoint,
        saves=said.get("saves") is True,
        metrics={
            name: float(value)
            for name, value in said.items()
            if name not in ("step", "checkpoint") and _is_number(value)
        },
    )


def _whole(value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= layout.MAX_STEP
    return value if whole else -1  # type: ignore[return-value]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
