"""Owns the fixtures of tests that need a cluster; a conftest imports them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import images as building
from tests.cluster import lifecycle
from tests.cluster.borrowing import borrowed, named
from tests.cluster.cluster import Cluster
from tests.cluster.images import Images


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster that CLUSTER and CLUSTER_CONTEXT name, else ours, brought up if need be."""
    existing = named(os.environ)
    if existing is not None:
        yield existing
        return
    with borrowed() as ours:
        yield ours


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    """Our images, up to date in every node; an existing cluster must be able to get them itself."""
    if cluster.engine is None:
        return building.names()
    building.build(lifecycle.builder_engine(cluster))
    return building.load(cluster)
