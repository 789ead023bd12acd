"""API agents as processes, over every backend: faults of one node, recovery of the gang.

Their processes are forks of a server that has imported torch: its imports would take most of the
processor time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.api import (
    DirectedHandler,
    LocalElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_rendezvous.api import RendezvousClosedError, RendezvousParameters
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler
from elasticjob_rendezvous.etcd.parameters import member_settings
from tests.integration.agent_api import functions
from tests.integration.agent_rig import PYTHONPATH
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import alive, process_tag
from tests.integration.torch.forked_gang import ForkedModule, start_fork_server
from tests.paths import ROOT
from tests.unit.agent.memory_rendezvous import until

__all__ = ["process_tag"]

SECONDS = 60.0
QUICK = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "elasticjob": {"last_call_timeout": 1, "settle": 0.3, "keep_alive_seconds": 10},
    "etcd": {"last_call_timeout": 1},
    "etcd-v2": QUICK,
    "c10d": {**QUICK, "store_type": "file"},
}


@dataclass
class Nodes:
    """Nodes of one run."""

    backend: str
    endpoint: str
    folder: Path
    least: int = 1
    most: int = 3
    run_id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:10]}")
    processes: list[ForkedModule] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def node(
        self,
        slots: int = 1,
        role: str = "trainer",
        max_restarts: int = 3,
        library: str = "ours",
    ) -> Any:
        given = {
            "library": library,
            "backend": self.backend,
            "endpoint": self.endpoint,
            "run_id": self.run_id,
            "least": self.least,
            "most": self.most,
            "settings": SETTINGS[self.backend],
            "slots": slots,
            "role": role,
            "folder": str(self.folder),
            "max_restarts": max_restarts,
        }
        return self.run("tests.integration.agent_api.node", json.dumps(given))

    def run(self, module: str, *arguments: str) -> ForkedModule:
        log = self.folder / f"log-{len(self.logs)}"
        env = {
            **os.environ,
            "PYTHONPATH": f"{PYTHONPATH}:{ROOT}",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        process = ForkedModule(module, arguments, env, ROOT, log)
        self.processes.append(process)
        self.logs.append(log)
        return process

    def after(self, number: int, world: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the first complete round of that size after `number`, and its environments."""

        def found() -> tuple[int, list[dict[str, Any]]] | None:
            rounds = {int(path.name.split("-")[1]) for path in self.folder.glob("ran-*")}
            for later in sorted(one for one in rounds if one > number):
                paths = [self.folder / f"ran-{later}-{rank}-of-{world}" for rank in range(world)]
                if all(path.exists() for path in paths):
                    return later, [json.loads(path.read_text()) for path in paths]
            return None

        try:
            until(found, f"a round of {world} workers after {number}", SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from error
        settled = found()
        assert settled is not None
        return settled

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def wait(self, process: ForkedModule) -> int:
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"a node still runs:\n{self.output()}") from error

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self.logs)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def v2_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("v2"), "3.5.35", arguments=("--enable-v2",))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(params=list(SETTINGS))
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    match request.param:
        case "c10d":
            endpoint = str(tmp_path / "store")
        case "elasticjob":
            endpoint = f"127.0.0.1:{request.getfixturevalue('newest_etcd').port}"
        case _:
            endpoint = f"127.0.0.1:{request.getfixturevalue('v2_etcd').port}"
    start_fork_server()
    request.getfixturevalue("process_tag")  # not before: shared servers stay
    folder = tmp_path / "nodes"
    folder.mkdir()
    made = Nodes(request.param, endpoint, folder)
    yield made
    made.close()


def test_gang_survives_lost_worker_newcomer_and_leaver(nodes: Nodes) -> None:
    first, second = nodes.node(slots=2), nodes.node(slots=1, role="reader")
    number, workers = nodes.after(0, 3)
    assert sorted(worker["ROLE_NAME"] for worker in workers) == ["reader", "trainer", "trainer"]
    assert {worker["GROUP_WORLD_SIZE"] for worker in workers} == {"2"}
    assert {worker["MASTER_PORT"] for worker in workers} == {workers[0]["MASTER_PORT"]}
    sizes = {worker["ROLE_NAME"]: worker["ROLE_WORLD_SIZE"] for worker in workers}
    assert sizes == {"trainer": "2", "reader": "1"}

    victim = next(worker for worker in workers if worker["ROLE_NAME"] == "reader")
    os.kill(victim["pid"], signal.SIGKILL)
    number, workers = nodes.after(number, 3)
    assert not alive(victim["pid"])
    port = workers[0]["MASTER_PORT"]

    third = nodes.node(slots=1)
    number, workers = nodes.after(number, 4)
    restarts = {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers}
    assert restarts == {"1"}, f"one failure, one count, the newcomer's too\n{nodes.output()}"
    assert port != workers[0]["MASTER_PORT"], "every round has a master of its own"

    second.send_signal(signal.SIGTERM)
    assert nodes.wait(second) == 0, nodes.output()
    number, workers = nodes.after(number, 3)
    assert {worker["ROLE_NAME"] for worker in workers} == {"trainer"}
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"1"}

    nodes.finish()
    assert [nodes.wait(first), nodes.wait(third)] == [0, 0], nodes.output()


def test_gang_continues_after_lost_node(nodes: Nodes) -> None:
    first, second = nodes.node(), nodes.node()
    number, workers = nodes.after(0, 2)
    second.kill()
    second.wait()
    _, workers = nodes.after(number, 1)
    assert workers[0]["TORCHELASTIC_RESTART_COUNT"] == "0", "a lost node is charged to nobody"
    nodes.finish()
    assert nodes.wait(first) == 0, nodes.output()


def test_exhausted_restart_budget_ends_all_agents(nodes: Nodes) -> None:
    nodes.least = 2
    both = [nodes.node(max_restarts=0) for _ in range(2)]
    _, workers = nodes.after(0, 2)
    os.kill(workers[1]["pid"], signal.SIGKILL)
    assert [nodes.wait(process) for process in both] == [1, 1], nodes.output()
    assert "failure of rank 1: -9" in nodes.output()


def test_sigterm_ends_agent_that_waits_for_members(nodes: Nodes) -> None:
    nodes.least = 2
    alone = nodes.node()
    until(lambda: "waiting: " in nodes.output(), "its start", SECONDS)
    alone.send_signal(signal.SIGTERM)
    assert nodes.wait(alone) == 0, nodes.output()
    assert "told to end by SIGTERM" in nodes.output()
    together = [nodes.node() for _ in range(2)]
    nodes.after(0, 2)
    nodes.finish()
    assert [nodes.wait(process) for process in together] == [0, 0], nodes.output()


TORCH_WORKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.environ["ELASTICJOB_ROUND"] = "1"  # which torchrun does not tell
from tests.integration.agent_api.functions import waits
waits(sys.argv[2])
"""


@pytest.mark.parametrize("nodes", ["etcd", "c10d"], indirect=True)
def test_torchrun_agrees_on_ranks_and_exit_barrier(nodes: Nodes, tmp_path: Path) -> None:
    """Roles and sizes differ; the exit barrier is the same for both."""
    nodes.least = nodes.most = 2
    script = tmp_path / "worker.py"
    script.write_text(TORCH_WORKER)
    conf = ",".join(f"{key}={value}" for key, value in SETTINGS[nodes.backend].items())
    ours = nodes.node(slots=1, role="reader")
    theirs = nodes.run(
        "torch.distributed.run", "--nnodes=2:2", "--nproc-per-node=2", "--role=trainer",
        f"--rdzv-backend={nodes.backend}", f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-id={nodes.run_id}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1",
        str(script), str(ROOT), str(nodes.folder),
    )  # fmt: skip
    until(lambda: len(list(nodes.folder.glob("ran-*-of-3"))) == 3, "three workers", SECONDS)
    workers = [json.loads(path.read_text()) for path in nodes.folder.glob("ran-*-of-3")]
    ranks = {
        (worker["ROLE_NAME"], worker["RANK"], worker["ROLE_RANK"], worker["ROLE_WORLD_SIZE"])
        for worker in workers
    }
    trainers, readers = {("0", "0", "2"), ("1", "1", "2")}, {("2", "0", "1")}
    if next(worker["GROUP_RANK"] for worker in workers if worker["ROLE_NAME"] == "reader") == "0":
        trainers, readers = {("1", "0", "2"), ("2", "1", "2")}, {("0", "0", "1")}
    assert ranks == {("trainer", *rest) for rest in trainers} | {
        ("reader", *rest) for rest in readers
    }
    assert len({worker["MASTER_PORT"] for worker in workers}) == 1
    nodes.finish()
    assert [nodes.wait(ours), nodes.wait(theirs)] == [0, 0], nodes.output()
    assert "gave up" not in nodes.output()
    assert "Error waiting on exit barrier" not in nodes.output()


FAILS_LAST = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
folder, first = Path(sys.argv[2]), not Path(sys.argv[2], "failed").exists()
os.environ["ELASTICJOB_ROUND"] = str(int(sys.argv[3]) + (not first))
from tests.integration.agent_api.functions import waits
waits(str(folder))
if first:
    deadline = time.monotonic() + 60
    while "; waiting up to" not in (folder / "log-0").read_text():
        assert time.monotonic() < deadline, "ours is not done"
        time.sleep(0.05)
    (folder / "failed").touch()
    (folder / "finish").unlink()
    sys.exit(1)
"""


@pytest.mark.parametrize("nodes", ["etcd", "etcd-v2", "c10d"], indirect=True)
def test_finished_agent_restarts_when_torchrun_fails_in_exit_barrier(
    nodes: Nodes, tmp_path: Path
) -> None:
    """torchrun waits for the other agent's end, at most for the duration of an exit barrier."""
    nodes.least = nodes.most = 2
    script = tmp_path / "worker.py"
    script.write_text(FAILS_LAST)
    conf = ",".join(f"{key}={value}" for key, value in SETTINGS[nodes.backend].items())
    ours = nodes.node()
    theirs = nodes.run(
        "torch.distributed.run", "--nnodes=2:2", "--nproc-per-node=1", "--max-restarts=3",
        f"--rdzv-backend={nodes.backend}", f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-id={nodes.run_id}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1",
        str(script), str(ROOT), str(nodes.folder), "2" if nodes.backend == "etcd" else "1",
    )  # fmt: skip
    number, _ = nodes.after(0, 2)
    nodes.finish()
    until(lambda: (nodes.folder / "failed").exists(), "torchrun's worker to fail", SECONDS)
    nodes.after(number, 2)
    nodes.finish()
    assert [nodes.wait(ours), nodes.wait(theirs)] == [0, 0], nodes.output()


@pytest.mark.parametrize("nodes", ["c10d"], indirect=True)
def test_torch_rendezvous_handler_drives_agent(nodes: Nodes) -> None:
    nodes.least = 2
    both = [nodes.node(library="torch"), nodes.node(slots=2, library="torch")]
    number, workers = nodes.after(0, 3)
    os.kill(workers[2]["pid"], signal.SIGKILL)
    _, workers = nodes.after(number, 3)
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"1"}
    assert {worker["GROUP_WORLD_SIZE"] for worker in workers} == {"2"}
    nodes.finish()
    assert [nodes.wait(process) for process in both] == [0, 0], nodes.output()


def v3_handler(etcd: EtcdServer, **settings: Any) -> EtcdV3RendezvousHandler:
    run_id = f"run-{uuid.uuid4().hex[:10]}"
    parameters = RendezvousParameters("elasticjob", etcd.url, run_id, 1, 1, "127.0.0.1", **settings)
    return EtcdV3RendezvousHandler(member_settings(parameters), run_id, 10.0)


def test_agent_replaces_connected_v3_handler(newest_etcd: EtcdServer, process_tag: str) -> None:
    handler = v3_handler(newest_etcd)
    spec = WorkerSpec("trainer", 2, handler, entrypoint=functions.exits, args=(0,))
    agent = LocalElasticAgent(spec)
    result = agent.run()
    assert (result.state, result.return_values) == (WorkerState.SUCCEEDED, {0: None, 1: None})
    group = agent.get_worker_group()
    assert (group.round, group.group_world_size, group.master_addr) == (1, 1, "127.0.0.1")
    assert isinstance(spec.rdzv_handler, DirectedHandler)


def test_succeeded_run_is_not_restarted(newest_etcd: EtcdServer, process_tag: str) -> None:
    handler = DirectedHandler.of(v3_handler(newest_etcd))
    spec = WorkerSpec("trainer", 1, handler, entrypoint=functions.exits, args=(0,))
    assert LocalElasticAgent(spec).run().state is WorkerState.SUCCEEDED
    with pytest.raises(RendezvousClosedError, match="needs an id of its own"):
        LocalElasticAgent(spec).run()


def test_subclass_with_own_rendezvous_uses_v3_handler(
    newest_etcd: EtcdServer, process_tag: str
) -> None:
    class Own(LocalElasticAgent):
        sought = 0

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            self.sought += 1
            super()._rendezvous(worker_group)

    handler = v3_handler(newest_etcd, slots=2)
    spec = WorkerSpec("trainer", 2, handler, entrypoint=functions.exits, args=(0,))
    agent = Own(spec)
    assert agent.run().return_values == {0: None, 1: None}
    assert agent.sought == 1
    assert handler.is_closed(), "the whole roster was done"
    handler.shutdown()
