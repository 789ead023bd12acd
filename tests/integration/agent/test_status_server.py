"""Job status served by an agent of torch's backends, before and after the rendezvous exists."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.records.agent_reports import PATH, SETUP, headers, read
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


def told(port: int) -> str | None:
    """Return the agent's reported state, as read by the operator; None if it does not answer."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{PATH}", headers=headers(KEY, int(time.time() * 1000))
    )
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return read(answer.read()).state
    except OSError:
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
    until(lambda: told(health_port) == SETUP, "setup", SECONDS)
    server.start()
    until(lambda: told(health_port) == "final", "a round", SECONDS)
    gang.finish()
    until(lambda: told(health_port) == "closed", "the end", SECONDS)
    assert (pod.agent.wait(SECONDS), pod.launcher.wait(SECONDS)) == (0, 0), gang.outputs()
