"""torchrun's plug-in in torch's own agent, with a server in place of the launcher."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticjob_torchrun.handler import MAX_RESTARTS, ROUND, NodeHandler
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

ADDRESS, PORT = "10.0.0.7", 23456
ROUND_ONE = {
    ROUND: "1",
    "MASTER_ADDR": ADDRESS,
    "MASTER_PORT": str(PORT),
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a server that answers a request to join with a round."""
    path = tmp_path / "launcher"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            link, _ = server.accept()
            with link, link.makefile("rb") as lines:
                for line in lines:
                    if json.loads(line)["type"] == "join":
                        answer = {"type": "round", "round": 1, "envs": {"0": ROUND_ONE}}
                        link.sendall(json.dumps(answer).encode() + b"\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"token@{path}"
        thread.join(60)


def started(
    launcher: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> LocalElasticAgent:
    """Return torch's agent after its rendezvous, which begins a round."""
    monkeypatch.setenv(ROUND, "0")
    monkeypatch.setenv("ELASTICJOB_TORCHRUN", launcher)
    handler = NodeHandler(launcher, "static", "run")
    spec = WorkerSpec("default", 1, rdzv_handler=handler, entrypoint="program", **options)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(folder)))
    try:
        agent._rendezvous(agent._worker_group)
    finally:
        handler.shutdown()
    return agent


@pytest.mark.parametrize("options", [{}, {"master_addr": "192.0.2.1", "master_port": 29500}])
def test_workers_get_the_address_of_the_round_and_no_limit_of_the_command_line(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    agent = started(launcher, tmp_path, monkeypatch, max_restarts=0, **options)
    group = agent._worker_group
    assert (group.master_addr, group.master_port) == (ADDRESS, PORT)
    assert (group.group_rank, [one.global_rank for one in group.workers]) == (1, [1])
    assert agent._remaining_restarts >= MAX_RESTARTS
