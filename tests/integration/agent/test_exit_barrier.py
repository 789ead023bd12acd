"""Agents of torch's backends that are killed after they are done: their work is not lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.integration.agent.finishing_gang import EACH, finish, rounds
from tests.integration.agent_rig import AgentProcess, Gang, gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import Ports
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SECONDS = 60.0
DONE = "done; waiting for the other agents"


@dataclass
class Rig:
    """Gang with its backend. An agent silent for `lost_seconds` counts as lost."""

    gang: Gang
    keeper: str
    options: tuple[str, ...]
    conf: str
    lost_seconds: float

    def agent(self, nodes: str) -> AgentProcess:
        host = "" if self.keeper == "etcd-v2" else f",is_host={not self.gang.agents}"
        options = (f"--rdzv-backend={self.keeper}", *self.options, "--local-addr=127.0.0.1")
        return self.gang.agent(nodes, *options, conf=self.conf + host)

    def by_rank(self, rank: int) -> AgentProcess:
        line = f"round 1: starting ranks {rank}"
        return until(
            lambda: next((a for a in self.gang.agents if line in a.output()), None), line, SECONDS
        )

    def pass_by(self, seconds: float) -> None:
        began = time.monotonic()
        until(lambda: time.monotonic() > began + seconds, f"{seconds:g} s", SECONDS)


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port for the store of c10d."""
    ports = Ports(1)
    yield ports.numbers[0]
    ports.close()


@pytest.fixture(params=["etcd-v2", "c10d"])
def rig(request: pytest.FixtureRequest, gang: Gang, start_etcd: StartEtcd, port: int) -> Rig:
    gang.script.write_text(EACH)
    conf = "last_call_timeout=8,settle=0.3,stop_grace=3"
    if request.param == "etcd-v2":
        gang.etcd = start_etcd("3.4", arguments=("--enable-v2",))
        return Rig(gang, "etcd-v2", (), conf, 10.0)
    options = (f"--rdzv-endpoint=127.0.0.1:{port}",)
    return Rig(gang, "c10d", options, f"{conf},keep_alive_seconds=3", 3.0)


def test_agent_killed_after_success_starts_no_round(rig: Rig) -> None:
    for _ in range(2):
        rig.agent("2:3")
    rig.gang.started(1, 2, SECONDS)
    # The first agent hosts the store of c10d.
    killed = rig.gang.agents[1]
    rank = next(rank for rank in range(2) if rig.by_rank(rank) is killed)
    finish(rig.gang, rank)
    until(lambda: DONE in killed.output(), "its end", SECONDS)
    rig.pass_by(1.5)
    killed.process.kill()
    rig.pass_by(rig.lost_seconds + 3)
    assert rounds(rig.gang) == {"1"}, rig.gang.outputs()
    newcomer = rig.agent("2:3")
    until(lambda: "seeking a place" in newcomer.output(), "a newcomer", SECONDS)
    rig.pass_by(4)
    assert rounds(rig.gang) == {"1"}, rig.gang.outputs()
    finish(rig.gang, 1 - rank)
    assert rig.gang.agents[0].wait(SECONDS) == 0, rig.gang.outputs()
    assert rounds(rig.gang) == {"1"}, rig.gang.outputs()
    newcomer.wait(SECONDS)


def test_agent_killed_before_success_starts_new_round(rig: Rig) -> None:
    for _ in range(3):
        rig.agent("2:3")
    rig.gang.started(1, 3, SECONDS)
    killed = rig.gang.agents[1]
    rank = next(rank for rank in range(3) if rig.by_rank(rank) is killed)
    others = [other for other in range(3) if other != rank]
    finish(rig.gang, others[0])
    rig.by_rank(others[0]).says(DONE)
    killed.process.kill()
    rig.gang.started(2, 2, SECONDS)
    for each in range(2):
        finish(rig.gang, each)
    ends = [agent.wait(SECONDS) for agent in rig.gang.agents if agent is not killed]
    assert ends == [0, 0], rig.gang.outputs()
