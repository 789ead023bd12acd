"""Plug-in of pytest that measures the processor time of tests: `--processor-times=N`.

The time of a test is that of pytest and of all processes that ended in the test and were waited
for, with their own children. Servers that several tests share count for the test that ends them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from heapq import nlargest
from operator import itemgetter
from pathlib import PurePath

import pytest

PROPERTY = "processor seconds"


def _spent() -> float:
    """Return the seconds of processor time of this process and its ended children."""
    return sum(os.times()[:4])


class ProcessorTimes:
    """Measurement of each test, in the process that runs it, and the sums at the end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tests: defaultdict[str, float] = defaultdict(float)
        self._before = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._before = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = _spent()
        report.user_properties.append((PROPERTY, now - self._before))
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        times = [value for name, value in report.user_properties if name == PROPERTY]
        assert isinstance(times[-1], float)  # the item's properties are those of all its phases
        self._tests[report.nodeid] += times[-1]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: defaultdict[str, float] = defaultdict(float)
        files: defaultdict[str, float] = defaultdict(float)
        for test, seconds in self._tests.items():
            file = test.partition("::")[0]
            files[file] += seconds
            folders[str(PurePath(file).parent)] += seconds
        for title, times in (("folders", folders), ("files", files), ("tests", self._tests)):
            terminalreporter.section(f"processor times of {title}")
            for name, seconds in nlargest(self._most, times.items(), key=itemgetter(1)):
                terminalreporter.line(f"{seconds:8.2f} s  {name}")
        terminalreporter.line(f"{sum(self._tests.values()):8.2f} s  in all")
