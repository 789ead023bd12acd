"""Outcome of a local run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticjob_cli.errors import ExitCode
from elasticjob_operator.model import ElasticJob


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome: the last object, every round as in `rounds.json`, and the exit code."""

    job: ElasticJob
    rounds: list[dict[str, Any]]
    exit_code: ExitCode
    seconds: float
