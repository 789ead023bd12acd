"""Settings of all tests: no deadline for Hypothesis, and default signal handling.

Property tests have no time limit, because other programs share the machine. Signals are reset so
that they end programs even if the tests run in the background or under `nohup`.
`--processor-times=N` prints the folders, files and tests with the most processor time.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.processor_times import ProcessorTimes

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A background shell ignores these signals, and every program started by a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "print the N folders, files and tests with the most processor time"
    parser.addoption("--processor-times", type=int, metavar="N", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if (most := config.getoption("--processor-times")) is not None:
        config.pluginmanager.register(ProcessorTimes(most))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, which take a fifth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


NOT_COLLECTED = ("torch._dynamo", "torch.distributed.tensor")
"""Modules with a second of imports each, which every worker would need only for the collection."""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Check imports, and exempt the collected tests and all modules from garbage collection.

    A whole run has 700,000 such objects in each worker. Collections would search them, and copy
    their memory in each forked child.
    """
    if found := [name for name in NOT_COLLECTED if name in sys.modules]:
        raise pytest.UsageError(
            f"a test module imports {', '.join(found)} when it is collected, in each of pytest's "
            "workers: import it in the functions that need it"
        )
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Stop the time limit of a failed test: its signal during the report would end the worker.

    Garbage collection stops, too: with Python 3.11 `ast.parse`, by which pytest finds the failed
    statement, raises SystemError if a finalizer formats a traceback meanwhile.
    """
    if call.excinfo is None:
        return (yield)
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
