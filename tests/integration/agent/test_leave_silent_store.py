"""Agents terminated while the store of a torch backend does not answer: they end within seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.integration.agent.finishing_gang import EACH
from tests.integration.agent_rig import Gang, gang
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import Ports
from tests.integration.launcher_rig import process_tag

__all__ = ["gang", "process_tag"]

SECONDS = 60.0
HOSTS = "hosts the c10d store at port"


@pytest.fixture
def port() -> Iterator[int]:
    ports = Ports(1)
    yield ports.numbers[0]
    ports.close()


@pytest.mark.parametrize("keeper", ["c10d", "etcd-v2"])
def test_agent_leaves_a_silent_store_within_seconds(
    keeper: str, gang: Gang, start_etcd: StartEtcd, port: int
) -> None:
    gang.script.write_text(EACH)
    options = [f"--rdzv-backend={keeper}", "--local-addr=127.0.0.1"]
    if keeper == "c10d":
        options.append(f"--rdzv-endpoint=127.0.0.1:{port}")
    else:
        gang.etcd = start_etcd("3.4", arguments=("--enable-v2",))
    conf = "last_call_timeout=8,settle=0.3,stop_grace=3"
    agents = [gang.agent("1:2", *options, conf=conf) for _ in range(2)]
    gang.started(1, 2, SECONDS)
    host = next((agent for agent in agents if HOSTS in agent.output()), None)
    leaving = next(agent for agent in agents if agent is not host)
    stopped = gang.etcd if host is None else host
    stopped.signal(signal.SIGSTOP)
    try:
        time.sleep(1.5)  # a poll waits for an answer by then
        leaving.signal(signal.SIGTERM)
        leaving.wait(SECONDS)
    finally:
        stopped.signal(signal.SIGCONT)
    first, second = ("cannot send leave to the rendezvous", "cannot leave the rendezvous")
    assert f"{first}: its store did not answer within 2.5 s" in leaving.output()
    assert f"{second}: its store did not answer within 4.5 s" in leaving.output()
