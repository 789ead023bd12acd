"""Surplus agents: they end as the job did, on each backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.agent.finishing_gang import EACH, finish
from tests.integration.agent_rig import AgentProcess, Gang, gang
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import Ports
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SECONDS = 60.0
FAILS = """    if number == "1" and rank == "0" and (folder / "fail").exists():
        raise ValueError("the loss is not a number")
"""
"""Condition for rank 0 of the first round to fail: on request by a file."""


class Rig:
    """Gang for rounds of two, one node of which is spare."""

    def __init__(self, gang: Gang, keeper: str, port: int) -> None:
        self.gang, self.keeper = gang, keeper
        self._options: tuple[str, ...] = () if keeper == "etcd" else (f"--rdzv-backend={keeper}",)
        if keeper == "c10d":
            self._options += (f"--rdzv-endpoint=127.0.0.1:{port}",)

    def start(self, count: int = 3, max_restarts: int = 0) -> list[AgentProcess]:
        return [self.agent(max_restarts) for _ in range(count)]

    def agent(self, max_restarts: int = 0) -> AgentProcess:
        conf = "last_call_timeout=2,settle=0.3,stop_grace=3"
        if self.keeper == "c10d":
            conf += f",is_host={not self.gang.agents},keep_alive_seconds=10"
        options = (*self._options, f"--max-restarts={max_restarts}", "--local-addr=127.0.0.1")
        return self.gang.agent("2:2", *options, conf=conf)

    def fail(self) -> None:
        (self.gang.folder / "fail").touch()

    def seated(self, number: int) -> set[str]:
        """Return the names of the agents whose workers are in a round."""
        self.gang.started(number, 2, SECONDS)
        line = f"round {number}: starting ranks"
        return {agent.name for agent in self.gang.agents if line in agent.output()}

    def ends(self) -> list[int]:
        return [agent.wait(SECONDS) for agent in self.gang.agents]


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port for the store of c10d."""
    ports = Ports(1)
    yield ports.numbers[0]
    ports.close()


@pytest.fixture(params=["etcd", "etcd-v2", "c10d"])
def rig(request: pytest.FixtureRequest, gang: Gang, start_etcd: StartEtcd, port: int) -> Rig:
    if request.param == "etcd-v2":
        gang.etcd = start_etcd("3.4", arguments=("--enable-v2",))
    gang.script.write_text(EACH + FAILS)
    return Rig(gang, request.param, port)


def named(rig: Rig, names: set[str]) -> AgentProcess:
    """Return the agent that has none of these names."""
    [spare] = [agent for agent in rig.gang.agents if agent.name not in names]
    return spare


def stands_by(rig: Rig, spare: AgentProcess) -> None:
    spare.says("waiting: round 1" if rig.keeper == "etcd" else "standing by for a place")


def test_surplus_agent_succeeds_with_job_and_later_agent_is_refused(rig: Rig) -> None:
    rig.start()
    stands_by(rig, named(rig, rig.seated(1)))
    for rank in range(2):
        finish(rig.gang, rank)
    assert rig.ends() == [0, 0, 0], rig.gang.outputs()
    if rig.keeper == "etcd-v2":  # the store of a c10d run is gone with its host
        assert rig.agent().wait(SECONDS) == 3, "what another run left is no success of this one"


def test_former_member_without_place_succeeds_with_job(rig: Rig) -> None:
    rig.start(max_restarts=3)
    stands_by(rig, named(rig, rig.seated(1)))
    rig.fail()
    stands_by(rig, named(rig, rig.seated(2)))
    for rank in range(2):
        finish(rig.gang, rank)
    assert rig.ends() == [0, 0, 0], rig.gang.outputs()


def test_surplus_agent_fails_with_job(rig: Rig) -> None:
    rig.start()
    stands_by(rig, named(rig, rig.seated(1)))
    rig.fail()
    assert rig.ends() == [1, 1, 1], rig.gang.outputs()
