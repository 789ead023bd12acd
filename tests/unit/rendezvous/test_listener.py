"""Log of refused peers: its rate limit."""

from __future__ import annotations

import logging

import pytest

from elasticjob_rendezvous.listener import BURST_LINES, LINE_SECONDS, RefusalLog


def test_refusals_beyond_the_rate_are_counted_in_the_next_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    refusals, logger = RefusalLog(lambda: now), logging.getLogger("elasticjob_rendezvous")
    for number in range(1000):
        refusals.refused(logger, f"peer-{number}", "no proof")
    assert len(caplog.records) == BURST_LINES
    now += LINE_SECONDS
    for _ in range(2):
        refusals.refused(logger, "late", "no proof")
    assert len(caplog.records) == BURST_LINES + 1
    last = caplog.records[-1].getMessage()
    assert last.startswith("refused a connection from late: no proof")
    assert f"{1000 - BURST_LINES} other refusals" in last
