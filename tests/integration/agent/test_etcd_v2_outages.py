"""Outages of etcd's v2 API: training goes on, and the end is reported afterwards."""

from __future__ import annotations

import time

import pytest

from tests.integration.agent.finishing_gang import EACH, finish, rounds
from tests.integration.agent_rig import Gang, gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SECONDS = 60.0
KEYS_LIVE_SECONDS = 10.0
UNTOLD = "cannot notify the other nodes yet"


@pytest.fixture(params=["3.4", "3.5.35"])
def etcd(request: pytest.FixtureRequest, start_etcd: StartEtcd, gang: Gang) -> EtcdServer:
    gang.etcd = start_etcd(request.param, arguments=("--enable-v2",))
    gang.script.write_text(EACH)
    return gang.etcd


def both(gang: Gang) -> None:
    for _ in range(2):
        gang.agent("2:2", "--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1")
    gang.started(1, 2)


def outage_beyond_key_lifetime(etcd: EtcdServer) -> None:
    etcd.kill()
    began = time.monotonic()
    until(lambda: time.monotonic() > began + KEYS_LIVE_SECONDS + 1, "the keys to run out", SECONDS)


def test_success_during_outage_is_reported_after_it(gang: Gang, etcd: EtcdServer) -> None:
    both(gang)
    etcd.kill()
    for rank in range(2):
        finish(gang, rank)
    until(lambda: all(UNTOLD in agent.output() for agent in gang.agents), "the trouble", SECONDS)
    etcd.start()
    assert [agent.wait(SECONDS) for agent in gang.agents] == [0, 0], gang.outputs()
    assert all(f"job {gang.run_id} succeeded\n" in agent.output() for agent in gang.agents)
    assert rounds(gang) == {"1"}


def test_member_finished_during_outage_is_not_lost(gang: Gang, etcd: EtcdServer) -> None:
    both(gang)
    outage_beyond_key_lifetime(etcd)
    finish(gang, 0)
    told = until(lambda: [a for a in gang.agents if UNTOLD in a.output()], "the trouble", SECONDS)
    etcd.start()
    told[0].says("done; waiting for the other agents")
    finish(gang, 1)
    assert [agent.wait(SECONDS) for agent in gang.agents] == [0, 0], gang.outputs()
    assert rounds(gang) == {"1"}, gang.outputs()


def test_outage_longer_than_key_lifetime_does_not_stop_training(
    gang: Gang, etcd: EtcdServer
) -> None:
    both(gang)
    outage_beyond_key_lifetime(etcd)
    etcd.start()
    back = time.monotonic()
    until(lambda: time.monotonic() > back + KEYS_LIVE_SECONDS + 3, "who is missed", SECONDS)
    assert rounds(gang) == {"1"}, gang.outputs()
    gang.agents[1].process.kill()
    gang.agent("2:2", "--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1")
    gang.started(2, 2, SECONDS)
