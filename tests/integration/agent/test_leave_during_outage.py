"""Agents terminated while etcd is down: they count as left afterwards."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.records.members import CauseKind, RoundState
from tests.integration.agent.test_failure_detection import running
from tests.integration.agent_rig import Gang, gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import NEWEST, EtcdServer
from tests.integration.launcher_rig import launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

SECONDS = 60.0


@pytest.fixture
def etcd(start_etcd: StartEtcd, gang: Gang) -> EtcdServer:
    """Start a private etcd for the gang, which may go away."""
    gang.etcd = start_etcd(NEWEST)
    return gang.etcd


@pytest.mark.parametrize("coordinates", [False, True], ids=["a member", "the coordinator"])
def test_agent_terminated_during_etcd_outage_counts_as_left(
    gang: Gang, etcd: EtcdServer, launcher_file: Path, coordinates: bool
) -> None:
    with running(gang, launcher_file) as job:
        pod, _ = job.pod(coordinates)
        etcd.kill()
        pod.agent.signal(signal.SIGTERM)
        pod.agent.wait(SECONDS)
        etcd.start()
        kind, _ = job.opened()
        assert kind == CauseKind.LEAVE, gang.outputs()
        until(lambda: gang.round().state is RoundState.FINAL, "the next round", SECONDS)
        round = gang.round()
        assert (round.number, round.cause.members) == (2, (pod.name,)), gang.outputs()
        assert round.cause.detail == "SIGTERM"
        assert (round.charged, round.counts.leaves, round.counts.losses) == ((), 1, 0)
