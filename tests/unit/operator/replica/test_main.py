"""Lease of an operator after the end of its active replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from elasticjob_operator.kubernetes.client import Kube
from elasticjob_operator.replica import main
from elasticjob_operator.replica.lease import LeaseSettings
from elasticjob_operator.settings import EtcdSettings, Settings, SidecarSettings
from tests.unit.operator.replica.test_leader import FakeKube

SETTINGS = Settings(
    SidecarSettings("image"),
    EtcdSettings(("127.0.0.1:1",)),
    LeaseSettings("ns", "lease", "replica"),
    health_port=0,
    metrics_port=0,
)


class Replica:
    """Active replica that ends at once; with an error if `fails`."""

    interrupted = False
    fails = False

    def __init__(self, *_: Any) -> None:
        pass

    async def run(self) -> None:
        if self.fails:
            raise RuntimeError("failed")


@pytest.mark.parametrize("fails", [False, True], ids=["signal", "failure"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_lease_expires_after_interrupted_reconciles_alone(
    interrupted: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of a cancelled reconcile may still take effect: no other may be active then."""
    kube = FakeKube()

    @asynccontextmanager
    async def connect() -> AsyncIterator[Kube]:
        yield kube.client()

    monkeypatch.setattr(Replica, "interrupted", interrupted)
    monkeypatch.setattr(Replica, "fails", fails)
    monkeypatch.setattr(main, "ActiveReplica", Replica)
    monkeypatch.setattr(Kube, "connect", connect)
    try:
        asyncio.run(main._serve(SETTINGS))
    except RuntimeError:
        assert fails
    assert kube.holder == ("replica" if interrupted else "")
