"""Fixtures of the end-to-end tests: an installed cluster, and a namespace for each test."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, NotOurs
from tests.cluster.fixtures import cluster, images
from tests.cluster.images import Images
from tests.e2e.console import Console
from tests.e2e.dump import dump
from tests.e2e.installation import DENYING, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.nodes import Nodes
from tests.e2e.recorder import Recorder
from tests.e2e.report import Report
from tests.paths import ROOT

BUILD = ROOT / "build" / "e2e"
OPENED: list[str] = []
"""Namespaces that exist now, dumped after a failure."""
CONSOLES: list[Console] = []

MakeNamespace = Callable[..., JobNamespace]

__all__ = ["cluster", "images"]


FIRST = (
    "test_applied_example_reaches_running",
    "test_conflicts.py",
    "test_failing.py",
    "test_digits.py",
)
"""Tests to run first: the example trains for more than a minute while small jobs are tested."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: long ones first, those that uninstall ElasticJob last."""

    def place(item: pytest.Item) -> int:
        names = (item.name, item.path.name)
        early = [number for number, name in enumerate(FIRST) if name in names]
        late = ("test_documented_pages.py", "test_install.py")
        return (
            early[0]
            if early
            else len(FIRST) + 1 + (late.index(item.path.name) if item.path.name in late else -1)
        )

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Dump the state of the cluster after a failure, before any clean-up."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(NotOurs):
        # On an existing cluster; on a cluster made here a test may inject faults into every node.
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, str(call.excinfo.value))
    if report.failed and CONSOLES:
        folder = BUILD / re.sub(r"[^\w.-]+", "-", item.name)
        dump(folder, CONSOLES[0], OPENED)
        report.sections.append(("the cluster at that moment", str(folder)))
    return report


@pytest.fixture(scope="session")
def console(cluster: Cluster) -> Console:
    environment = cluster.environment()
    own = Path(sys.executable).parent  # kubectl's plug-in is here
    made = Console(
        (str(cluster.kubectl_program), "--context", cluster.context),
        (str(cluster.helm_program), "--kube-context", cluster.context),
        {**environment, "PATH": f"{own}:{environment['PATH']}"},
    )
    CONSOLES.append(made)
    return made


@pytest.fixture(scope="session")
def nodes(cluster: Cluster, console: Console) -> Nodes:
    return Nodes(cluster, console)


@pytest.fixture(scope="session")
def report() -> Report:
    """Return a new report, after removing measurements and dumps of earlier sessions."""
    shutil.rmtree(BUILD, ignore_errors=True)
    return Report(BUILD / "report.json")


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster, images: Images, console: Console, report: Report
) -> Iterator[Installation]:
    """Install ElasticJob with the chart, after removing an earlier installation."""
    made = Installation(console)
    made.remove()
    OPENED.append(DENYING)
    began = time.monotonic()
    made.install()
    report.add("installs", seconds=round(time.monotonic() - began, 1))
    yield made
    made.remove()


@pytest.fixture(scope="session")
def recorder(console: Console, installation: Installation) -> Iterator[Recorder]:
    made = Recorder(console)
    made.begin()
    yield made
    made.end()


@pytest.fixture(scope="session")
def example_namespace(console: Console, installation: Installation) -> Iterator[JobNamespace]:
    """Yield the namespace of the example, whose test is spread over the session."""
    with _namespaces(console) as make:
        yield make("e2e-digits")


@pytest.fixture(scope="module")
def make_namespace(console: Console, installation: Installation) -> Iterator[MakeNamespace]:
    """Yield a function that makes namespaces; they are deleted with the module, without waiting."""
    with _namespaces(console) as make:
        yield make


@contextmanager
def _namespaces(console: Console) -> Iterator[MakeNamespace]:
    with ExitStack() as stack:

        def make(name: str, *labels: str) -> JobNamespace:
            console.kubectl("create", "namespace", name)
            console.kubectl("label", "namespace", name, "elasticjob-e2e=", *labels)
            OPENED.append(name)
            stack.callback(OPENED.remove, name)
            stack.callback(console.kubectl, "delete", "namespace", name, "--wait=false")
            return JobNamespace(console, name)

        yield make


@pytest.fixture(scope="module")
def ns(request: pytest.FixtureRequest, make_namespace: MakeNamespace) -> JobNamespace:
    """Return the module's own namespace, such as `e2e-faults`."""
    return make_namespace(request.path.stem.replace("test_", "e2e-"))
