"""Measurements of the tests: build/e2e/report.json. All processes of a run add to it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.environment import locked


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements by kind, each a list of rows, and distributions by name."""

    path: Path

    def add(self, kind: str, **row: Any) -> None:
        with self._opened() as found:
            found.setdefault(kind, []).append(row)

    def spread(self, name: str, seconds: list[float]) -> float:
        """Record the distribution of these times; return the median."""
        ordered = sorted(seconds)
        median = statistics.median(ordered)
        with self._opened() as found:
            found[name] = {
                "count": len(ordered),
                "medianMs": round(1000 * median),
                "p95Ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))]),
                "mostMs": round(1000 * ordered[-1]),
            }
        return median

    @contextmanager
    def _opened(self) -> Iterator[dict[str, Any]]:
        """Yield the contents to be changed; one process at a time."""
        with locked(self.path.with_suffix(".lock")):
            found = json.loads(self.path.read_text()) if self.path.exists() else {}
            yield found
            self.path.write_text(json.dumps(found, indent=2) + "\n")
