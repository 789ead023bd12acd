"""Fixtures of tests that need a cluster, for conftest files to import."""

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
    """Yield the cluster named by CLUSTER and CLUSTER_CONTEXT, otherwise a borrowed kind cluster."""
    existing = named(os.environ)
    if existing is not None:
        yield existing
        return
    with borrowed() as ours:
        yield ours


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    """Return the current images, loaded into every node; an existing cluster must pull them."""
    if cluster.engine is None:
        return building.names()
    building.build(lifecycle.builder_engine(cluster))
    return building.load(cluster)
