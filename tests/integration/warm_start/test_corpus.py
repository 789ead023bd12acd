"""Packages of the corpus that `make test` runs: a job is the same cold and warm.

`make corpus` runs all of them; see tests/corpus.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpus.compare import differences
from tests.corpus.environments import cache, environment
from tests.corpus.job import run_job
from tests.corpus.manifest import Package, packages
from tests.corpus.results import trouble_of
from tests.integration.etcd_server import EtcdServer

SUITE = [one for one in packages() if one.suite]
NODES = 1
"""Number of nodes, whose agents start workers independently of each other; two in `make corpus`."""
COLD_RUNS = 3
"""Most runs without warm start that show which values differ between runs."""


@pytest.fixture(scope="session")
def interpreter() -> Path:
    return environment(cache(), "small") / "bin" / "python"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", SUITE, ids=[one.name for one in SUITE])
def test_cold_and_warm_jobs_behave_the_same(
    package: Package, interpreter: Path, newest_etcd: EtcdServer
) -> None:
    def job(warm: bool) -> dict[str, Any]:
        return run_job(package, interpreter, newest_etcd, warm, NODES).as_json()

    colds = [job(warm=False)]
    assert trouble_of(colds[0]) == ""
    warm = job(warm=True)
    assert warm["warm"] > 0, (warm["cold"], warm["trouble"])
    while any(not one.documented for one in differences(colds, warm)) and len(colds) < COLD_RUNS:
        # A difference between cold runs is no property of warm ones.
        colds.append(job(warm=False))
    found = [str(one) for one in differences(colds, warm) if not one.documented]
    assert found == [], warm["trouble"]
