"""Fixtures of the end-to-end tests: an installed cluster, and a namespace for each test."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.remote import Producer

from tests.cluster.borrowing import Ledger, ends_with_tests
from tests.cluster.cluster import Cluster, NotOurs
from tests.cluster.fixtures import cluster, images
from tests.cluster.images import Images
from tests.cluster.kind import GARBAGE_COLLECTION
from tests.e2e import policies
from tests.e2e.console import Console, opened
from tests.e2e.dump import dump
from tests.e2e.groups import ByGroup, Claimed, group_of, is_pinned, place_of
from tests.e2e.installation import DENYING, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import counting, job
from tests.e2e.nodes import Nodes
from tests.e2e.recorder import Recorder
from tests.e2e.report import Report
from tests.e2e.steady import NAME as STEADY
from tests.paths import ROOT

BUILD = ROOT / "build" / "e2e"
OPENED: list[str] = []
"""Namespaces that exist now, dumped after a failure."""
CONSOLES: list[Console] = []
CLAIMED = Claimed(BUILD / "claims")

MakeNamespace = Callable[..., JobNamespace]

__all__ = ["cluster", "images"]


def pytest_configure(config: pytest.Config) -> None:
    """Remove measurements and dumps of earlier runs, in the first process of a run."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        shutil.rmtree(BUILD, ignore_errors=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup:
    config.option.loadscopereorder = False  # the collection has the order of the groups
    return ByGroup(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by group; a file's tests keep their order."""
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Hold the claims of the test's group until a test with other claims is next."""
    CLAIMED.hold(group_of(item.nodeid).claims)
    try:
        return (yield)
    finally:
        CLAIMED.keep(group_of(nextitem.nodeid).claims if nextitem else {})


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
def console(cluster: Cluster) -> Iterator[Console]:
    environment = cluster.environment()
    own = Path(sys.executable).parent  # kubectl's plug-in is here
    environment |= GARBAGE_COLLECTION | {"PATH": f"{own}:{environment['PATH']}"}
    with opened(cluster, environment) as made:
        CONSOLES.append(made)
        yield made


@pytest.fixture(scope="session")
def nodes(cluster: Cluster, console: Console) -> Nodes:
    return Nodes(cluster, console)


@pytest.fixture(scope="session")
def report() -> Report:
    return Report(BUILD / "report.json")


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster, images: Images, console: Console, report: Report
) -> Iterator[Installation]:
    """Install ElasticJob with the chart, after removing an earlier installation.

    The first process of a run installs, the last one removes, unless the cluster ends with the run.
    """
    made, ledger = Installation(console), Ledger(BUILD / "installation-users")
    OPENED.append(DENYING)
    with ledger.open():
        if not ledger.users():
            policies.clear(cluster)
            made.remove()
            began = time.monotonic()
            made.install()
            report.add("installs", seconds=round(time.monotonic() - began, 1))
        ledger.enter(os.getpid(), brought_up=True)
    yield made
    with ledger.open():
        if ledger.leave(os.getpid()) and not ends_with_tests(cluster):
            made.remove()


@pytest.fixture(scope="session")
def recorder(console: Console, installation: Installation) -> Iterator[Recorder]:
    made = Recorder(console)
    made.begin()
    yield made
    made.end()


@pytest.fixture(scope="session")
def example_namespace(console: Console, installation: Installation) -> Iterator[JobNamespace]:
    """Yield the namespace of the example, which two tests observe."""
    with _namespaces(console, pinned=False) as make:
        yield make("e2e-digits")


@pytest.fixture(scope="module")
def make_namespace(
    request: pytest.FixtureRequest, console: Console, installation: Installation
) -> Iterator[MakeNamespace]:
    """Yield a function that makes namespaces; they are deleted with the module, without waiting."""
    with _namespaces(console, pinned=is_pinned(request.path.name)) as make:
        yield make


@contextmanager
def _namespaces(console: Console, *, pinned: bool) -> Iterator[MakeNamespace]:
    with ExitStack() as stack:

        def make(name: str, *labels: str) -> JobNamespace:
            console.kubectl("create", "namespace", name)
            console.kubectl("label", "namespace", name, "elasticjob-e2e=", *labels)
            OPENED.append(name)
            stack.callback(OPENED.remove, name)
            stack.callback(console.kubectl, "delete", "namespace", name, "--wait=false")
            return JobNamespace(console, name, pinned)

        yield make


@pytest.fixture(scope="module")
def ns(request: pytest.FixtureRequest, make_namespace: MakeNamespace) -> JobNamespace:
    """Return the module's own namespace, such as `e2e-faults`."""
    return make_namespace(request.path.stem.replace("test_", "e2e-"))


@pytest.fixture(scope="module")
def steady_job(ns: JobNamespace, recorder: Recorder) -> JobNamespace:
    """Return the module's namespace with a job that counts its steps."""
    ns.apply(job(STEADY, counting(), nodes=2, most=4))
    ns.running(STEADY, 2)
    return ns
