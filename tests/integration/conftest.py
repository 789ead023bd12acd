"""Fixtures of the integration tests: real etcd servers, and a real Kubernetes API server."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distribution import long_first
from tests.integration.apiserver import ApiServer
from tests.integration.certificates import Certificates, make_certificates
from tests.integration.etcd_server import NEWEST, VERSIONS, EtcdCluster, EtcdServer
from tests.integration.etcd_v2_rig import start_v2_run, v2_etcd

__all__ = ["start_v2_run", "v2_etcd"]

StartEtcd = Callable[..., EtcdServer]
LONG_SECONDS = 300.0
"""Shortest time limit of a long test."""
LOG_CHARACTERS = 3000
"""Maximum part of a log file in the report of a failed test: its end."""
MAX_LOGS = 12


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker begin with long tests, which are those with a long time limit."""

    def seconds(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker and marker.args else 0.0
        return limit if limit >= LONG_SECONDS else 0.0

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = long_first(items, seconds, lambda item: str(item.path), workers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the log files in the test's folder to the report of a failure."""
    report = yield
    folder = item.funcargs.get("tmp_path") if isinstance(item, pytest.Function) else None
    if report.failed and report.when == "call" and isinstance(folder, Path):
        with contextlib.suppress(OSError):  # programs of the test may still remove files
            logs = [path for path in sorted(folder.rglob("*.log")) if path.is_file()]
            for log in logs[:MAX_LOGS]:
                if text := log.read_text(errors="replace")[-LOG_CHARACTERS:].strip():
                    report.sections.append((f"log {log.relative_to(folder)}", text))
    return report


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """Collect garbage after each file: unclosed connections are then reported for its last test,
    and not for a test of another file."""
    yield
    gc.collect()


@pytest.fixture(scope="session", params=VERSIONS)
def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """Yield a shared server, one for each version. Tests use keys of their own (`prefix`)."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), request.param)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="session")
def newest_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Yield a shared server of the newest version. Tests use keys of their own (`prefix`)."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), NEWEST)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Return a key prefix that no other test uses."""
    return f"/test/{request.node.name}/"


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[StartEtcd]:
    """Yield a function that starts private servers, for faults or special options."""
    with ExitStack() as stack:

        def start(version: str = NEWEST, **options: Any) -> EtcdServer:
            number = len(list(tmp_path.glob("etcd-*")))
            server = EtcdServer(tmp_path / f"etcd-{number}", version, **options)
            stack.callback(server.close)
            return server.start()

        yield start


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[..., EtcdCluster]]:
    """Yield a function that starts a cluster of three members; they end with the test."""
    with ExitStack() as stack:

        def start(version: str = NEWEST) -> EtcdCluster:
            cluster = EtcdCluster(tmp_path / "cluster", version)
            stack.callback(cluster.close)
            return cluster.start()

        yield start


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Yield a shared API server with ElasticJobs defined. Tests use a namespace of their own."""
    server = ApiServer(tmp_path_factory.mktemp("apiserver"))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def namespace(request: pytest.FixtureRequest, api_server: ApiServer) -> str:
    """Return a new namespace, named after the test."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return api_server.namespace(f"{words[:50].strip('-')}-{uuid.uuid4().hex[:8]}")
