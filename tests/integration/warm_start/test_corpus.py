"""Packages of the corpus that `make test` runs: a job is the same cold and warm.

`make corpus` runs all of them; see tests/corpus.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus.compare import differences
from tests.corpus.environments import cache, environment
from tests.corpus.job import run_job
from tests.corpus.manifest import Package, packages
from tests.corpus.results import trouble_of
from tests.integration.etcd_server import EtcdServer

SUITE = [one for one in packages() if one.suite]


@pytest.fixture(scope="session")
def interpreter() -> Path:
    return environment(cache(), "small") / "bin" / "python"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("package", SUITE, ids=[one.name for one in SUITE])
def test_cold_and_warm_jobs_behave_the_same(
    package: Package, interpreter: Path, newest_etcd: EtcdServer
) -> None:
    colds = [run_job(package, interpreter, newest_etcd, warm=False).as_json()]
    assert trouble_of(colds[0]) == ""
    warm = run_job(package, interpreter, newest_etcd, warm=True).as_json()
    assert warm["warm"] > 0, (warm["cold"], warm["trouble"])
    if any(not one.documented for one in differences(colds, warm)):
        # A difference between two cold runs is no property of warm ones.
        colds.append(run_job(package, interpreter, newest_etcd, warm=False).as_json())
    found = [str(one) for one in differences(colds, warm) if not one.documented]
    assert found == [], warm["trouble"]
