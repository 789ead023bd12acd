"""Jobs of a cluster in the dashboard: bounds of the reads, and the end of long logs."""

from __future__ import annotations

from elasticjob_cli.dashboard.sources import last_lines
from elasticjob_cli.log_lines import LogOptions, parsed_lines


def test_rank_of_thousands_of_digits_is_no_rank() -> None:
    lines = [f"[{'9' * 5000}] x", "[3] y"]
    found = last_lines([parsed_lines("demo-0", lines)], LogOptions(rank=3), [])
    assert [line.text for line in found] == ["[3] y"]
