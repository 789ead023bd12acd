"""Job status served by an agent of torch's backends, before and after the rendezvous exists."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_operator.rendezvous.report_client import POLL_ERRORS, Agent, fetch_report
from elasticjob_rendezvous.protocol.records.agent_reports import SETUP, read
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.agent_rig import Gang, Pod, gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.launcher_rig import launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

SECONDS = 60.0
KEY = b"a secret of this run"


@pytest.fixture
def health_port() -> Iterator[int]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the agent listens over it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def told(port: int, member: str) -> str | None:
    """Return the agent's reported state, as read by the operator; None if it does not answer."""
    try:
        return read(asyncio.run(fetch_report(Agent(member, "127.0.0.1"), port, KEY))).state
    except POLL_ERRORS:
        return None


def test_agent_reports_setup_until_etcd_is_reachable(
    gang: Gang, start_etcd: StartEtcd, launcher_file: Path, health_port: int
) -> None:
    server = start_etcd("3.4", arguments=("--enable-v2",))
    server.kill()
    env = {
        "ELASTICJOB_BACKEND": "etcd-v2",
        "ELASTICJOB_BOUNDS": encode(RendezvousParams(1, 1)).decode(),
        "ELASTICJOB_ENDPOINTS": f"127.0.0.1:{server.port}",
        "ELASTICJOB_HEALTH_PORT": str(health_port),
    }
    (pod,) = gang.pods(1, launcher_file, env=env)
    assert isinstance(pod, Pod)
    member = f"uid-{pod.name}"
    until(lambda: told(health_port, member) == SETUP, "setup", SECONDS)
    server.start()
    until(lambda: told(health_port, member) == "final", "a round", SECONDS)
    gang.finish()
    until(lambda: told(health_port, member) == "closed", "the end", SECONDS)
    assert (pod.agent.wait(SECONDS), pod.launcher.wait(SECONDS)) == (0, 0), gang.outputs()
