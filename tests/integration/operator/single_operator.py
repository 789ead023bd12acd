"""Fixtures: a test's namespace, and an operator that watches it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer
from tests.integration.operator_rig import Namespace, Operator, alone_in


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> Iterator[Operator]:
    options = alone_in(namespace)
    with Operator(tmp_path, api_server, newest_etcd, options=options).running() as replica:
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)
