"""Buffers of simulated snapshots, and the search for a run that breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elasticjob.train.snapshots.core.agreement import Part


class Violation(Exception):
    """Broken invariant."""


@dataclass
class Buffer:
    """`part` is None while it is being overwritten; `content` is what it really holds."""

    part: Part | None = None
    content: Part | None = None


def pair() -> list[Buffer]:
    return [Buffer(), Buffer()]


def are_broken(runs: Iterable[Callable[[], object]]) -> bool:
    """Return True if one of these runs breaks an invariant."""
    for run in runs:
        try:
            run()
        except Violation:
            return True
    return False
