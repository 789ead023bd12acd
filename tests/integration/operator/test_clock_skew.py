"""Operator on a machine whose clock is wrong, on a real API server."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.agent_records import Agents
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in

WRONG_CLOCK = """
import datetime, sys, time

right, off = time.time, datetime.timedelta(seconds={seconds})

def wrong():
    asking = sys._getframe(1).f_globals.get("__name__", "")
    return right() + ({seconds} if asking.startswith("elasticjob_") else 0)

class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + off

time.time = wrong
datetime.datetime = Wrong
"""
"""Module that Python imports first. gRPC's deadlines use a clock that it cannot change."""


@pytest.mark.parametrize("off_seconds", [4_000, -4_000], ids=["ahead", "behind"])
def test_pod_age_uses_api_server_clock(
    tmp_path: Path,
    api_server: ApiServer,
    newest_etcd: EtcdServer,
    namespace: str,
    off_seconds: int,
) -> None:
    folder = tmp_path / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WRONG_CLOCK.format(seconds=off_seconds))
    options = {
        **alone_in(namespace),
        "PYTHONPATH": str(folder),
    }
    ns = Namespace(api_server, namespace)
    operator = Operator(tmp_path, api_server, newest_etcd, options=options)
    with operator.running():
        patience = 600 if off_seconds > 0 else 1
        ns.create_job(minNodes=1, maxNodes=2, elasticity={"pendingTimeoutSeconds": patience})
        ns.await_pods("job-0", "job-1")
        keys = Agents(newest_etcd, ns).keys

        def expected() -> int | None:
            found = newest_etcd.ctl("get", "--print-value-only", keys.bounds)
            return json.loads(found)["expected"] if found else None

        wanted = 2 if off_seconds > 0 else 0
        wait_until(lambda: expected() == wanted, f"{wanted} expected, are {expected()}", SECONDS)
        started = ns.status()["startTime"]
        assert abs(_seconds(started) - _seconds(ns.job()["metadata"]["creationTimestamp"])) < 300


def _seconds(said: str) -> float:
    return datetime.fromisoformat(said).timestamp()
