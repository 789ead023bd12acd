"""Measurements of the tests: build/e2e/report.json."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """Measurements by kind; each is a row for people and programs."""

    path: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, **row: Any) -> None:
        self.rows.setdefault(kind, []).append(row)
        self.write()

    def spread(self, name: str, seconds: list[float]) -> float:
        """Record the distribution of these times; return the median."""
        ordered = sorted(seconds)
        median = statistics.median(ordered)
        self.totals[name] = {
            "count": len(ordered),
            "medianMs": round(1000 * median),
            "p95Ms": round(1000 * ordered[int(0.95 * (len(ordered) - 1))]),
            "mostMs": round(1000 * ordered[-1]),
        }
        self.write()
        return median

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.totals, **self.rows}, indent=2) + "\n")
