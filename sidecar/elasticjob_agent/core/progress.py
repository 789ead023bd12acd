"""Parser for a worker's progress file. The content is not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticjob import layout
from elasticjob_rendezvous.protocol.text import one_line

TEXT_BYTES = 64 * 1024
"""Maximum size of a progress file in text form."""
_MAX_REPLICAS = 1000
_MAX_MS = 2**50


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Latest progress of one worker of a round. Times are milliseconds since 1970.

    Args:
        step, at_ms: last reported step and its time; -1 and 0 before the first.
        checkpoint_step: step contained in the last reported checkpoint; -1 before the first.
        checkpoints: number of reported checkpoints, for scripts that count them.
        first_step_ms: time of the first reported step; None before it or if unknown.
        points: number of save points passed, at which all ranks could have saved together.
        saves: True if the script wants to save before a planned stop.
        reports: True if it then reports the checkpoint in any case.
        keeps: True if the script's state can be kept in memory before a planned stop, other than
            that of the whole job, and is then reported like a checkpoint.
        resumed: True once the script's first save of a snapshot since the restore has returned.
        metrics: numbers for display.
        saved_ns: last write time of the checkpoint-only file; 0 for never.
        snapshots: report on the worker's snapshots; None before the first.
        answer: answer to requests for a checkpoint; None from a library of an earlier release.
    """

    step: int = -1
    at_ms: int = 0
    checkpoint_step: int = -1
    checkpoints: int = 0
    first_step_ms: int | None = None
    points: int = 0
    saves: bool = False
    reports: bool = False
    keeps: bool = False
    resumed: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_ns: int = 0
    snapshots: layout.SnapshotReport | None = None
    answer: layout.Answer | None = None

    @property
    def is_asked(self) -> bool:
        """True if the worker passes save points, so that a planned stop may ask it to save."""
        return self.saves or self.keeps


def worker_progress(content: bytes, written_ms: int) -> WorkerProgress | None:
    """Parse a progress file; return None if it is empty or incomplete.

    `written_ms` is the file's write time, used for the text form, which may lack a time.
    """
    if content[:1] == b"{":
        return _from_text(content, written_ms)
    record = layout.unpack(content)
    if record is None:
        return None
    return WorkerProgress(
        step=_int_or(record.step),
        at_ms=record.at_ms,
        checkpoint_step=_int_or(record.checkpoint_step),
        checkpoints=record.checkpoints,
        first_step_ms=record.first_step_ms or None,
        points=record.points,
        saves=bool(record.flags & layout.SAVES),
        reports=bool(record.flags & layout.REPORTS),
        keeps=bool(record.flags & layout.KEEPS),
        resumed=bool(record.flags & layout.RESUMED),
        # A single NaN object, so that unchanged metrics compare equal.
        metrics={
            name: math.nan if math.isnan(value) else value
            for name, value in layout.metrics_of(record).items()
        },
        snapshots=_plausible(layout.unpack_report(content)),
        answer=_printable(layout.unpack_answer(content)),
    )


def _printable(answer: layout.Answer | None) -> layout.Answer | None:
    """Return the answer with its error as one line of text."""
    return None if answer is None else answer._replace(error=one_line(answer.error))


def _plausible(report: layout.SnapshotReport | None) -> layout.SnapshotReport | None:
    """Return the report with all numbers in the range of the records."""
    if report is None:
        return None
    steps = (report.step, report.stored, report.replicated, report.restored, report.lost)
    step, stored, replicated, restored, lost = (max(layout.NO_STEP, each) for each in steps)
    return report._replace(
        step=step,
        stored=stored,
        replicated=replicated,
        replicas=min(max(report.replicas, 0), _MAX_REPLICAS),
        size=min(report.size, layout.MAX_STEP),
        restored=restored,
        lost=lost,
        lost_ms=min(max(report.lost_ms, 0), _MAX_MS),
        limit=min(report.limit, layout.MAX_STEP),
    )


def with_saved(progress: WorkerProgress, content: bytes, written_ns: int) -> WorkerProgress:
    """Return the progress with the checkpoint-only file applied; that file may name a step."""
    step = content.strip()[:20]
    named = int(step) if step.isdigit() else -1
    return replace(
        progress,
        saves=True,
        saved_ns=written_ns,
        checkpoint_step=max(progress.checkpoint_step, _int_or(named)),
    )


def _from_text(content: bytes, written_ms: int) -> WorkerProgress | None:
    """Parse `{"step": 7, "checkpoint": 5, "saves": true, "loss": 0.25}`, all fields optional."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    step, checkpoint = _int_or(fields.get("step")), _int_or(fields.get("checkpoint"))
    return WorkerProgress(
        step=step,
        at_ms=written_ms if step >= 0 else 0,
        checkpoint_step=checkpoint,
        saves=fields.get("saves") is True,
        metrics={
            name: float(value)
            for name, value in fields.items()
            if name not in ("step", "checkpoint") and _is_number(value)
        },
    )


def _int_or(value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= layout.MAX_STEP
    return value if whole else -1  # type: ignore[return-value]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
